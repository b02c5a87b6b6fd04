"""The wire types: their examples are valid, and what they repeat of the model and the task queue agrees with it."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

import pytest
from pydantic import BaseModel

from models.inference import answer
from service import wire
from service.wire import advice
from service.wire.predictions import Prediction, Predictions, in_words
from service.wire.tasks import TaskAnswer, TaskProgress, TaskState
from tasks.queue import task as domain


def models() -> list[type[BaseModel]]:
    modules = [import_module(f"{wire.__name__}.{module.name}") for module in iter_modules(wire.__path__)]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return sorted(
        (value for value in found if issubclass(value, BaseModel) and value is not BaseModel),
        key=lambda model: model.__name__,
    )


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_a_models_examples_are_instances_of_it(model: type[BaseModel]) -> None:
    for example in model.model_json_schema().get("examples", []):
        again = model.model_validate(example).model_dump(mode="json", exclude_unset=True)
        assert again == example  # the example has no field that the model lacks


def test_certainty_on_the_wire_is_that_of_the_model() -> None:
    field = Prediction.model_fields["certainty"]

    assert get_args(field.annotation) == get_args(answer.Certainty)
    assert f"at least {answer.SURE_SHARE};" in (field.description or "")


@pytest.mark.parametrize(
    ("certainty", "label", "nearest", "p_novel", "words"),
    [
        ("sure", "apple", [("apple", 0.93), ("pear", 0.04)], 0.03, "sure: apple (93 %)"),
        (
            "unsure",
            "pear",
            [("pear", 0.54), ("apple", 0.31), ("fig", 0.1)],
            0.05,
            "unsure: looks like pear (54 %), apple (31 %)",
        ),
        ("unsure", "pear", [("pear", 0.5)], 0.5, "unsure: looks like pear (50 %)"),
        ("unsure", "pear", [("pear", 0.6), ("apple", 0.049)], 0.3, "unsure: looks like pear (60 %)"),
        ("unsure", "pear", [("pear", 0.6), ("apple", 0.05)], 0.3, "unsure: looks like pear (60 %), apple (5 %)"),
        # Merged classes add up: the label need not come first.
        ("unsure", "pear", [("apple", 0.4), ("pear", 0.3)], 0.3, "unsure: looks like pear (30 %), apple (40 %)"),
        # Likely novel, but below the threshold.
        ("unsure", "pear", [("pear", 0.14), ("apple", 0.11)], 0.6, "unsure: looks like pear (14 %), or never seen"),
        ("novel", None, [("pear", 0.12), ("apple", 0.04)], 0.9, "never seen; nearest: pear (12 %)"),
        ("novel", None, [("pear", 1e-9)], 1.0, "never seen; nearest: pear (< 1 %)"),
        ("novel", None, [], 1.0, "never seen"),
    ],
)
def test_an_answer_in_words(
    certainty: str, label: str | None, nearest: list[tuple[str, float]], p_novel: float, words: str
) -> None:
    assert in_words(certainty, label, nearest, p_novel) == words

    prediction = Prediction.model_validate(
        {
            **Predictions.model_json_schema()["examples"][0]["predictions"][0],
            "certainty": certainty,
            "label": label,
            "nearest": [{"label": name, "share": share} for name, share in nearest],
            "p_novel": p_novel,
        }
    )
    assert prediction.in_words() == words


def test_task_states_on_the_wire_are_those_of_the_queue() -> None:
    assert get_args(TaskState) == get_args(domain.TaskState)


def test_task_progress_on_the_wire_has_the_fields_and_defaults_of_the_queue() -> None:
    given = {name: (field.default, field.is_required()) for name, field in TaskProgress.model_fields.items()}

    assert given == {
        name: (field.default, field.is_required()) for name, field in domain.TaskProgress.model_fields.items()
    }


def test_every_task_field_on_the_wire_but_those_of_a_submission_is_read_from_a_task() -> None:
    names = set(TaskAnswer.model_fields) - {"fresh"}

    assert names <= set(domain.Task.model_fields) | {"counts"}
    assert names <= set(domain.TaskSummary.model_fields)


@pytest.mark.parametrize("name", ["Advice", "ConfusedPair", "WrongLabel", "WeakClass"])
def test_advice_on_the_wire_has_the_fields_of_the_trainer(name: str) -> None:
    trained = getattr(import_module("trainer.learning.advice"), name)

    assert list(getattr(advice, name).model_fields) == [field.name for field in fields(trained)]


def test_advice_in_words() -> None:
    given = advice.Advice.model_validate(
        {
            "confused": [{"classes": ["apple", "pear"], "images": 4, "share": 0.2}],
            "wrong_labels": [
                {"image": "a" * 64, "label": "plum", "looks_like": "pear", "share": 0.97},
                {"image": "b" * 64, "label": "fig", "looks_like": "pear", "share": 0.9},
            ],
            "weak": [
                {"name": "pear", "images": 4, "error": 0.21, "more": 10},
                {"name": "fig", "images": 20, "error": 0.2, "more": 20, "scenes": 3},
                {"name": "plum", "images": 3, "error": 0.3, "more": 10, "scenes": 1},
            ],
        }
    )

    assert given.in_words({"a" * 64: "plum/3.jpg"}) == [
        "plum/3.jpg is labelled plum, but looks like pear (97 %): check its label",
        "image bbbbbbbbbbbb is labelled fig, but looks like pear (90 %): check its label",
        "apple and pear are confused: 4 images of one are answered as the other",
        "10 more images of pear would help most (it has 4)",
        "20 more images of fig, taken elsewhere, would help (it has 20, of 3 scenes)",
        "10 more images of plum, taken elsewhere, would help (it has 3, of 1 scene)",
    ]


def test_a_task_of_the_queue_becomes_a_task_on_the_wire() -> None:
    now = datetime.now(UTC)
    progress = domain.TaskProgress(phase="training", epoch=1, epochs=3, losses=(2.0, 1.0))
    task = domain.Task(
        id="t-1",
        created=now,
        updated=now,
        submitted_by="anna",
        batch_sha256="a" * 64,
        classes={"kiwi": ["b" * 64]},
        progress=progress,
    )

    answer = TaskAnswer.model_validate(task)

    assert (answer.id, answer.counts, answer.fresh) == ("t-1", {"kiwi": 1}, True)
    assert answer.progress is not None
    assert answer.progress.model_dump() == progress.model_dump()
