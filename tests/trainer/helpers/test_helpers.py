"""Two processes learn what one process learns, bit by bit; a helper that dies fails the training and is replaced."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from models.inference.answer import answer
from models.inference.stored_model import model_tensors
from tests.support.paths import ROOT
from tests.support.tiny_helper import COMMAND
from tests.support.tiny_model import TinyImages, class_tasks, features_of, learn_tasks, tiny_backbone, tiny_learner
from trainer.helpers import group
from trainer.helpers.group import HelperLost, Helpers
from trainer.helpers.helper import UnknownJob, compute
from trainer.helpers.messages import Message
from trainer.learning.forward_passes import CHUNK, ForwardPasses
from trainer.learning.learner import Learned
from trainer.learning.methods.shards import SHARD
from trainer.learning.processes import Job

PLAN = {"blocks": 2, "seed": 0}
TASKS = class_tasks([3, 2], images=40)
LARGE_BATCH = {"batch_size": 2 * SHARD + 3, "replay_size": 60}  # several shards, the last one smaller


@pytest.fixture(scope="module")
def helpers() -> Iterator[Helpers]:
    """One process besides this one. Starting it takes longer than a test, so the tests share it."""
    helpers = Helpers(2, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, COMMAND)
    yield helpers
    helpers.close()


def learn(helpers: Helpers | None) -> list[Learned]:
    learner = tiny_learner(blocks=2, **LARGE_BATCH)
    with ExitStack() as stack:
        if helpers is not None:
            learner.tokens.processes = stack.enter_context(helpers.training(PLAN, "cpu"))
        return learn_tasks(learner, TASKS)


@pytest.fixture(scope="module")
def alone() -> list[Learned]:
    return learn(None)


@pytest.fixture(scope="module")
def sent() -> Counter[str]:
    """Jobs of the helper, by kind."""
    return Counter()


@pytest.fixture(scope="module")
def together(helpers: Helpers, sent: Counter[str]) -> list[Learned]:
    send = group.send

    def counting(message: Message, rank: int) -> None:
        sent[message.values["kind"]] += 1
        send(message, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "send", counting)
        return learn(helpers)


def test_one_process_and_two_learn_the_same_statistics(alone: list[Learned], together: list[Learned]) -> None:
    for mine, theirs in zip(alone, together, strict=True):
        expected, found = model_tensors(mine.model), model_tensors(theirs.model)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            np.testing.assert_allclose(found[name], tensor, rtol=0, atol=1e-9, err_msg=name)
        assert mine.samples == theirs.samples


def test_one_process_and_two_give_the_same_answers_for_300_images(
    alone: list[Learned], together: list[Learned]
) -> None:
    names = [f"class {c}" for c in range(6)]  # the last one is novel
    asked = [key for keys in TinyImages().batch(names, count=50, start=100).values() for key in keys]
    features = [features_of(tiny_learner(blocks=2), learned[-1].model, asked) for learned in (alone, together)]
    answers = [
        answer(learned[-1].model, learned[-1].model.evidence(found))
        for learned, found in zip((alone, together), features, strict=True)
    ]
    assert len(answers[0]) == 300
    assert len({one.label for one in answers[0]}) > 1
    assert answers[0] == answers[1]


def test_a_helper_computes_its_share_of_chunks_and_of_shards(together: list[Learned], sent: Counter[str]) -> None:
    images = sum(len(keys) for task in TASKS for keys in task.values())
    assert sent["tokens"] >= images // CHUNK // 2
    assert sent["gradient"] >= 10
    assert {"task features", "frozen features"} <= set(sent)


def test_a_helper_that_cannot_open_the_backbone_is_named_with_its_reason(helpers: Helpers) -> None:
    with (
        pytest.raises(HelperLost, match="helper 1 cannot start: KeyError: 'blocks'"),
        helpers.training({"seed": 0}, "cpu"),
    ):
        pytest.fail("the training began")


def test_a_job_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(UnknownJob, match="unknown kind of job 'hessian': run all processes of a training with the"):
        compute(ForwardPasses(tiny_backbone(2), 0), Job("hessian", {}, {}))


def test_a_helper_that_dies_fails_the_training_at_once_and_the_next_one_has_a_new_helper(
    helpers: Helpers, alone: list[Learned]
) -> None:
    for child in helpers.children.values():
        child.kill()
        child.wait()
    helpers.environment["DIE_AFTER"] = "3"
    started = time.monotonic()
    with pytest.raises(HelperLost, match="helper 1 has died or does not answer"):
        learn(helpers)
    assert time.monotonic() - started < group.READY_SECONDS / 2
    del helpers.environment["DIE_AFTER"]
    found, expected = model_tensors(learn(helpers)[-1].model), model_tensors(alone[-1].model)
    assert all(np.array_equal(found[name], tensor) for name, tensor in expected.items())
