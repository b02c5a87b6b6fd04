"""The training loop of a task: its number of steps and its progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.network import hat
from tests.support.tiny_model import TinyImages, silent_progress, tiny_learner
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learner
from trainer.learning.settings import LearnerSettings
from trainer.learning.train_task import TaskData, _TaskNetwork, image_passes, initial_adapters, train_task


@dataclass
class Counted:
    """Work of one training."""

    images: int  # passed through the network
    temperatures: list[float]  # of each step


def counted(images: int, replayed: int = 0, **chosen: Any) -> tuple[Counted, TaskData, LearnerSettings]:
    """Train on `images` images of two classes and count the work."""
    learner: Learner = tiny_learner(**{"epochs": 1, **chosen})
    keys = [key for names in TinyImages().batch(["a", "b"], count=-(-images // 2)).values() for key in names][:images]
    replay = TinyImages().batch(["old"], count=replayed)["old"]
    data = TaskData(keys, [0 if key.startswith("a") else 1 for key in keys], 2, replay)
    out = Counted(0, [])
    get, step = learner.tokens.get, _TaskNetwork.step

    def getting(keys: Sequence[str], views: Sequence[int] | None = None) -> Any:
        out.images += len(keys)
        return get(keys, views)

    def stepping(self: _TaskNetwork, loss: Any, s: float) -> None:
        out.temperatures.append(s)
        step(self, loss, s)

    shared = initial_adapters(learner.backbone, learner.settings)
    with patch.object(learner.tokens, "get", getting), patch.object(_TaskNetwork, "step", stepping):
        train_task(
            learner.tokens,
            shared,
            data,
            learner.settings,
            "task",
            "phase",
            Checkpoint(None),
            silent_progress(),
        )
    return out, data, learner.settings


@pytest.mark.parametrize("images", [3, 4, 10, 79, 80, 81])
def test_a_small_task_has_enough_steps_for_the_masks_to_harden(images: int) -> None:
    done, _, _ = counted(images, epochs=2, batch_size=4, min_steps=20)
    assert len(done.temperatures) % 2 == 0
    steps = len(done.temperatures) // 2
    assert steps >= 20
    for epoch in (done.temperatures[:steps], done.temperatures[steps:]):
        assert epoch == sorted(epoch)
        assert epoch[0] == pytest.approx(1 / hat.S_MAX)
        assert epoch[-1] == pytest.approx(hat.S_MAX)


def test_a_large_task_is_passed_over_once_per_epoch() -> None:
    done, _, _ = counted(90, batch_size=4, min_steps=20)
    assert (done.images, len(done.temperatures)) == (90, 23)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.integers(1, 6), st.integers(1, 12), st.sampled_from([0, 2, 9]), st.integers(1, 2))
def test_the_planned_work_equals_the_images_that_pass(
    images: int, batch: int, min_steps: int, replayed: int, epochs: int
) -> None:
    done, data, chosen = counted(images, replayed, batch_size=batch, min_steps=min_steps, epochs=epochs)
    assert image_passes(data, chosen) == done.images
