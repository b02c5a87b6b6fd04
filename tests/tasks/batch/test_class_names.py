"""Class names: which labels are valid, and which are easily confused."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.errors import BatchError
from tests.support.batches import batch_problems, check_batch, one_class
from tests.support.images import make_image

IMAGES = [make_image(seed) for seed in range(8)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("..", "path"),
        ("../cat", "path"),
        ("animals/cat", "path"),
        ("animals\\cat", "path"),
        ("/etc/cat", "path"),
        ("C:cat", "path"),
        (".cat", "leading dot"),
        ("ca\0t", "control"),
        ("cat\n", "control"),
        ("cat\u202e", "control"),
        ("cat\udc80", "not valid text"),
        ("ood", "reserved"),
        ("OOD ", "reserved"),
        ("", "blank"),
        (" \t", "blank"),
        ("\u200b", "blank"),
        ("c" * 65, "65 characters, more than 64"),
    ],
)
def test_an_invalid_name_is_one_line(name: str, what: str) -> None:
    (problem,) = batch_problems(one_class(name))
    assert what in problem
    assert problem.isprintable()


@pytest.mark.parametrize("name", ["cat", "Katze", "grüne Katze", "猫", "cat 2", "a..b", "x" * 64, "👩‍🔬"])
def test_a_plain_name_in_any_language_is_accepted(name: str) -> None:
    assert check_batch(one_class(name)).classes == (name,)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Cat", "cat "),
        ("cat", "CAT"),
        ("big cat", "big  cat"),
        ("café", "cafe\u0301"),
        ("cat", "c\u200bat"),
        ("ﬁsh", "fish"),
    ],
)
def test_easily_confused_names_are_refused(one: str, other: str) -> None:
    given = [(one, "1", IMAGES[0]), (one, "2", IMAGES[1]), (other, "3", IMAGES[2]), (other, "4", IMAGES[3])]
    (problem,) = batch_problems(given)
    assert "differ only in case, spaces or Unicode form" in problem
    assert all(repr(name) in problem or ascii(name) in problem for name in (one, other))


def test_the_message_distinguishes_two_unicode_forms_of_a_name() -> None:
    (problem,) = batch_problems([("café", "1", IMAGES[0]), ("café", "2", IMAGES[1]), ("cafe\u0301", "3", IMAGES[2])])
    assert r"'caf\xe9' and 'cafe\u0301'" in problem


def test_a_name_easily_confused_with_a_known_class_is_refused() -> None:
    (problem,) = batch_problems(one_class("Cat"), known=("cat",))
    assert "'Cat' differs from the known class 'cat'" in problem


@given(st.lists(st.text(max_size=70), min_size=1, max_size=4, unique=True), st.lists(st.text(max_size=5), max_size=2))
def test_any_text_as_a_name_is_accepted_or_a_batch_error(names: list[str], known: list[str]) -> None:
    given = [(name, f"{at}", IMAGES[2 * i + at]) for i, name in enumerate(names) for at in (0, 1)]
    problems: list[str] | None = None
    try:
        batch = check_batch(given, known)
    except BatchError as error:
        problems = error.problems
    if problems is not None:
        assert problems
        assert all(len(problem.splitlines()) == 1 for problem in problems)
    else:
        assert len(batch.classes) == len(names)
        assert all(name == unicodedata.normalize("NFC", name).strip() for name in batch.classes)
        assert not any(set(name) & set("/\\\0\n") or name.startswith(".") for name in batch.classes)
        assert check_batch(given, batch.classes).task_id == batch.task_id  # the same batch when submitted again
