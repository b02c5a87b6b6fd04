"""The training loop of a task: its number of steps and its progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.network import hat
from models.network.adapted_blocks import Masks
from tests.support.tiny_model import TinyImages, silent_progress, tiny_learner
from trainer.learning.adapter_units import initial_adapters
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learner
from trainer.learning.methods import TaskData
from trainer.learning.methods.hat import HatNetwork
from trainer.learning.methods.replay import ReplayObjective
from trainer.learning.settings import LearnerSettings
from trainer.learning.train_task import image_passes, train_task


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
    get, masks = learner.tokens.get, HatNetwork.masks

    def getting(keys: Sequence[str], views: Sequence[int] | None = None) -> Any:
        out.images += len(keys)
        return get(keys, views)

    def masking(self: HatNetwork, s: float) -> Masks:
        out.temperatures.append(s)
        return masks(self, s)

    shared = initial_adapters(learner.backbone.adapters, learner.backbone.spec.dimensions, learner.settings)
    with patch.object(learner.tokens, "get", getting), patch.object(HatNetwork, "masks", masking):
        train_task(
            learner.tokens,
            shared,
            data,
            learner.settings,
            "task",
            Checkpoint(None),
            silent_progress(),
        )
    return out, data, learner.settings


@pytest.mark.parametrize("anneal", ["linear", "geometric"])
@pytest.mark.parametrize("images", [3, 4, 10, 79, 80, 81])
def test_a_small_task_has_enough_steps_for_the_masks_to_harden(images: int, anneal: str) -> None:
    done, _, _ = counted(images, epochs=2, batch_size=4, min_steps=20, anneal=anneal)
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


def learned_masks(names: list[str], **chosen: Any) -> NDArray[np.float32]:
    """The hard masks of a task with these classes; the start is the same for all of them."""
    learner = tiny_learner(**{"epochs": 10, "min_steps": 20, "bottleneck": 32, "learning_rate": 0.02, **chosen})
    keys = [key for keys in TinyImages().batch(names, count=20).values() for key in keys]
    data = TaskData(keys, np.repeat([0, 1], 20).tolist(), 2, [])
    shared = initial_adapters(learner.backbone.adapters, learner.backbone.spec.dimensions, learner.settings)
    progress, checkpoint = silent_progress(), Checkpoint(None)
    out = train_task(learner.tokens, shared, data, learner.settings, "task", checkpoint, progress).network.shared
    return np.concatenate([out.used1.ravel(), out.used2.ravel()])


@pytest.mark.parametrize("anneal", ["linear", "geometric"])
def test_masks_depend_on_the_data(anneal: str) -> None:
    """The sparsity loss is off: in a network this small it alone decides."""
    one, same, other = (
        learned_masks(names, anneal=anneal, sparsity=0) for names in (["a", "b"], ["a", "b"], ["c", "d"])
    )
    assert np.array_equal(one, same)
    assert (one != other).mean() > 0.05


@pytest.mark.parametrize("anneal", ["linear", "geometric"])
def test_every_unit_gets_a_gradient_of_the_data_within_an_epoch(anneal: str) -> None:
    learner = tiny_learner(epochs=1, min_steps=20, sparsity=0, anneal=anneal)
    keys = [key for keys in TinyImages().batch(["a", "b"], count=10).values() for key in keys]
    shared = initial_adapters(learner.backbone.adapters, learner.backbone.spec.dimensions, learner.settings)
    data = TaskData(keys, np.repeat([0, 1], 10).tolist(), 2, [])
    network = HatNetwork(learner.tokens, shared, data, learner.settings, "task", ReplayObjective())
    with torch.no_grad():
        network.parameters["b1"] += 5  # no image turns off the relu of a unit
    moved = {key: torch.zeros_like(network.parameters[key]) for key in ("e1", "e2")}
    step = network.optimiser.step

    def stepping() -> None:
        for key, total in moved.items():
            gradient = network.parameters[key].grad
            assert gradient is not None
            total += gradient.abs()
        step()

    with patch.object(network.optimiser, "step", stepping):
        network.epoch(data, np.random.default_rng(0))
    for total in moved.values():
        assert (total > 0).all()


def test_the_training_of_the_paper_can_be_chosen() -> None:
    """HAT with linear annealing, one learning rate and lambda 0.75; nothing drawn in the back-update."""
    chosen = {"anneal": "linear", "mask_rate": 1.0, "sparsity": 0.75, "back_drawn": 0.0, "min_steps": 1}
    done, _, used = counted(12, epochs=3, batch_size=4, **chosen)
    assert done.temperatures == pytest.approx([1 / hat.S_MAX, (hat.S_MAX + 1 / hat.S_MAX) / 2, hat.S_MAX] * 3)
    assert used.recipe.model_dump(include=chosen.keys()) == chosen


def test_only_methods_with_replay_take_few_steps_per_epoch() -> None:
    chosen: list[dict[str, Any]] = [{}, {"method": "hat-csi"}, {"method": "sup-csi"}, {"preset": "paper"}]
    assert [LearnerSettings(**fields).min_steps for fields in chosen] == [5, 20, 20, 20]
