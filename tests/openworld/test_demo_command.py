"""`openworld demo`: how it reports answers. The loop itself needs a service: tests/system."""

import pytest

from models.inference.answer import Answer, certainty
from openworld.commands.demo import summarise


def answered(label: str | None, share: float = 0.9) -> Answer:
    nearest = [(label or "cat", share)]
    return Answer(label, label is None, certainty(label, nearest), -405.2, 0.5, 0.1, 0, nearest)


@pytest.mark.parametrize(
    ("answers", "taught", "text"),
    [
        ([answered("cat")] * 15, True, "15 correct (15 sure)"),
        (
            [answered("cat"), answered("cat", 0.6), answered(None), answered("coffee")],
            True,
            "2 correct (1 sure), 1 never seen, 1 wrong (coffee)",
        ),
        ([answered(None)] * 15, False, "15 never seen"),
        ([answered(None)] * 2, True, "0 correct (0 sure), 2 never seen"),
        ([answered("coffee"), answered("rocket"), answered("coffee")], False, "3 wrong (coffee, rocket)"),
    ],
)
def test_the_answers_to_a_class_are_reported_in_words(answers: list[Answer], taught: bool, text: str) -> None:
    assert summarise("cat", answers, taught) == text
