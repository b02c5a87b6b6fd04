"""Later tasks change no bit of earlier features, neither in a version's tensors nor in the shared adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainer.learning.methods.hat
from models.inference.model import Gaussians, Model, SharedAdapters, TaskModel
from models.inference.stored_model import model_tensors
from models.network.adapted_blocks import Masks, TaskTensors, apply_masks, tensors_of
from models.network.backbone import Backbone
from tests.support.tiny_model import (
    DIMENSIONS,
    TinyImages,
    any_tokens,
    class_tasks,
    learn_tasks,
    silent_progress,
    tiny_backbone,
    tiny_learner,
    tiny_settings,
)
from trainer.learning.adapter_units import UnitWindow, grow_adapters, initial_adapters
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learned, Learner

slow = settings(max_examples=25, deadline=None)
histories = st.fixed_dictionaries(
    {
        "counts": st.lists(st.integers(1, 3), min_size=2, max_size=4),
        "blocks": st.integers(1, 2),
        "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "grow_when_used": st.sampled_from([0.15, 1.0]),
        "windowed": st.booleans(),
        "sparsity": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 99),
    }
)


inputs = st.builds(any_tokens, st.integers(0, 2**32 - 1), st.floats(0.01, 100))


def feature(backbone: Backbone, tokens: Tensor, task: TaskTensors, masks: Masks | None = None) -> Tensor:
    with torch.inference_mode():
        z: Tensor = backbone.blocks(tokens, task, masks)
    return z


@contextmanager
def recorded_masks() -> Iterator[list[Masks]]:
    """Collect the hard masks of every task that is learned in the context."""
    masks: list[Masks] = []
    put = UnitWindow.put

    def recording(task: TaskTensors, m1: Tensor, m2: Tensor) -> TaskTensors:
        masks.append(Masks(m1.clone(), m2.clone()))
        return apply_masks(task, m1, m2)

    def spreading(window: UnitWindow, shared: SharedAdapters, trained: SharedAdapters) -> SharedAdapters:
        """From the units of the window to all units."""
        every = torch.zeros(shared.used1.shape).scatter(1, torch.from_numpy(window.units), masks[-1].m1)
        masks[-1] = Masks(every, masks[-1].m2)
        return put(window, shared, trained)

    with (
        patch.object(trainer.learning.methods.hat, "apply_masks", recording),
        patch.object(UnitWindow, "put", spreading),
    ):
        yield masks


def learn_history(history: dict[str, object], back_update: bool) -> tuple[Learner, list[Learned], list[Masks]]:
    counts = history["counts"]
    assert isinstance(counts, list)
    own = {key: value for key, value in history.items() if key != "counts"}
    learner = tiny_learner(**own, back_update=back_update, learning_rate=0.2)  # type: ignore[arg-type]
    with recorded_masks() as masks:
        learned = learn_tasks(learner, class_tasks(counts, images=5))
    assert len(masks) == len(counts)
    return learner, learned, masks


def unfolded(shared: SharedAdapters, task: TaskModel, width: int) -> TaskTensors:
    """The first `width` units of the shared adapters, with the task's norms."""
    a = shared.adapters
    parts = (a.w1[:, :width], a.b1[:, :width], a.w2[:, :, :width], a.b2, task.norm_w, task.norm_b)
    return TaskTensors(*(torch.tensor(part) for part in parts))


def same(one: object, other: object) -> bool:
    """Whether two dataclasses of arrays are equal bit for bit."""
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(one)  # type: ignore[arg-type]
    )


@slow
@given(histories, st.booleans(), inputs)
def test_a_later_task_does_not_change_an_earlier_feature(
    history: dict[str, object], back_update: bool, tokens: Tensor
) -> None:
    learner, learned, _ = learn_history(history, back_update)
    for k in range(len(learned)):
        at_first = feature(learner.backbone, tokens, tensors_of(learned[k].model.tasks[k]))
        assert torch.isfinite(at_first).all()
        for later in learned[k + 1 :]:
            assert torch.equal(feature(learner.backbone, tokens, tensors_of(later.model.tasks[k])), at_first)


@slow
@given(histories, inputs)
def test_a_later_task_does_not_change_an_earlier_feature_in_the_shared_adapters(
    history: dict[str, object], tokens: Tensor
) -> None:
    """A version serves folded copies of the adapters; here a task's masks are applied to the shared ones."""
    learner, learned, masks = learn_history(history, back_update=False)
    for k in range(len(learned)):
        task, shared = learned[k].model.tasks[k], learned[k].model.shared
        width = shared.bottleneck
        at_first = feature(learner.backbone, tokens, unfolded(shared, task, width), masks[k])
        torch.testing.assert_close(at_first, feature(learner.backbone, tokens, tensors_of(task)), rtol=1e-3, atol=1e-4)
        for later in learned[k + 1 :]:
            now = later.model.shared
            assert torch.equal(feature(learner.backbone, tokens, unfolded(now, task, width), masks[k]), at_first)
            # Units added later are masked out for the task: they change nothing.
            wider = Masks(F.pad(masks[k].m1, (0, now.bottleneck - width)), masks[k].m2)
            whole = feature(learner.backbone, tokens, unfolded(now, task, now.bottleneck), wider)
            torch.testing.assert_close(whole, at_first, rtol=1e-3, atol=1e-4)


@slow
@given(histories)
def test_used_units_stay_used_and_keep_their_weights(history: dict[str, object]) -> None:
    _, learned, masks = learn_history(history, back_update=False)
    for k, (old, new) in enumerate(pairwise(learned)):
        was, now = old.model.shared, new.model.shared
        width = was.bottleneck
        assert now.bottleneck >= width
        own = masks[k + 1]
        assert np.array_equal(now.used1[:, :width], np.maximum(was.used1, own.m1[:, :width].numpy()))
        assert np.array_equal(now.used1[:, width:], own.m1[:, width:].numpy())
        assert np.array_equal(now.used2, np.maximum(was.used2, own.m2.numpy()))
        used1, used2 = was.used1 == 1, was.used2 == 1
        both = used2[:, :, None] & used1[:, None, :]
        assert np.array_equal(now.adapters.w1[:, :width][used1], was.adapters.w1[used1])
        assert np.array_equal(now.adapters.b1[:, :width][used1], was.adapters.b1[used1])
        assert np.array_equal(now.adapters.w2[:, :, :width][both], was.adapters.w2[both])
        assert np.array_equal(now.adapters.b2[used2], was.adapters.b2[used2])


@slow
@given(histories, st.booleans())
def test_back_updating_changes_only_the_heads_of_earlier_tasks(history: dict[str, object], back_update: bool) -> None:
    _, learned, _ = learn_history(history, back_update)
    for before, after in pairwise(learned):
        for old, new in zip(before.model.tasks, after.model.tasks, strict=False):
            assert same(old.adapters, new.adapters)
            assert same(old.gaussians, new.gaussians)
            assert np.array_equal(old.norm_w, new.norm_w)
            assert np.array_equal(old.norm_b, new.norm_b)
            assert old.classes == new.classes
            assert back_update or same(old.head, new.head)
            assert np.isfinite(new.head.weight).all()


def test_adapters_grow_when_a_layer_is_nearly_full_and_not_before() -> None:
    tight = learn_tasks(tiny_learner(grow_when_used=0.3, sparsity=0), class_tasks([1, 1]))
    assert tight[0].model.shared.used_ratio >= 0.3
    assert [one.model.shared.bottleneck for one in tight] == [6, 12]
    roomy = learn_tasks(tiny_learner(grow_when_used=1.0, bottleneck=32), class_tasks([1, 1]))
    assert [one.model.shared.bottleneck for one in roomy] == [32, 32]


def test_growing_adapters_keeps_every_old_unit_in_place() -> None:
    backbone, chosen = tiny_backbone(), tiny_settings(grow_when_used=0.6)
    start = initial_adapters(backbone.adapters, backbone.spec.dimensions, chosen)
    assert grow_adapters(start, chosen) is start
    full = SharedAdapters(start.adapters, np.ones_like(start.used1), start.used2)
    grown = grow_adapters(full, chosen)
    assert grown.bottleneck == 12
    assert np.array_equal(grown.adapters.w1[:, :6], start.adapters.w1)
    assert np.array_equal(grown.adapters.w2[:, :, :6], start.adapters.w2)
    assert grown.used1.tolist() == [[1] * 6 + [0] * 6] * 2
    assert grown.adapters.w1[:, 6:].any()
    assert not np.array_equal(grown.adapters.w1[:, 6:], start.adapters.w1)  # new units are not copies of the old


def test_adapters_grow_until_the_used_share_is_below_the_limit() -> None:
    start = initial_adapters(tiny_backbone().adapters, DIMENSIONS, tiny_settings())
    full = SharedAdapters(start.adapters, np.ones_like(start.used1), start.used2)
    for limit, units in ((0.9, 12), (0.45, 18), (0.3, 24), (0.15, 42)):
        grown = grow_adapters(full, tiny_settings(grow_when_used=limit))
        assert grown.bottleneck == units
        assert grown.used_ratio == pytest.approx(6 / units)
        assert grown.used_ratio < limit
        steps = [grown.adapters.w1[:, at : at + 6] for at in range(0, units, 6)]
        assert not any(np.array_equal(one, other) for one, other in pairwise(steps))  # each step has its own weights


def test_learning_a_task_does_not_change_the_parent_model() -> None:
    learner = tiny_learner()
    parent = learn_tasks(learner, class_tasks([2]))[0]
    before = {name: array.copy() for name, array in model_tensors(parent.model).items()}
    images = TinyImages().batch(["class 1", "late"], start=20)  # a known class and a new one
    child = learner.learn(parent.model, parent.samples, images, Checkpoint(None), silent_progress())
    assert child.model.classes == ("class 0", "class 1", "late")
    assert all(np.array_equal(array, before[name]) for name, array in model_tensors(parent.model).items())


def test_more_images_of_a_known_class_change_only_its_statistics_and_heads() -> None:
    learner = tiny_learner()
    before = learn_tasks(learner, class_tasks([2, 2]))[-1]
    more = TinyImages().batch(["class 1"], count=10, start=50)
    after = learner.learn(before.model, before.samples, more, Checkpoint(None), silent_progress())
    assert after.new_head is None
    assert after.model.classes == before.model.classes
    assert same(after.model.shared.adapters, before.model.shared.adapters)
    for old, new in zip(before.model.tasks, after.model.tasks, strict=True):
        one, other = (feature(learner.backbone, any_tokens(), tensors_of(task)) for task in (old, new))
        assert torch.equal(one, other)
    counts = [count_of(after.model, k) - count_of(before.model, k) for k in range(2)]
    held_out = {sample.key for sample in after.samples.held_out} & set(more["class 1"])
    assert held_out
    assert counts == [10 - len(held_out), 0]
    frozen = after.model.frozen.counts - before.model.frozen.counts
    assert frozen.tolist() == [0, 10, 0, 0]  # the closed-form statistics hold all of them
    assert same(after.model.tasks[1].head, before.model.tasks[1].head)
    assert not same(after.model.tasks[0].head, before.model.tasks[0].head)


def test_more_images_of_the_only_task_change_its_head() -> None:
    learner = tiny_learner()
    before = learn_tasks(learner, class_tasks([2]))[0]
    more = TinyImages().batch(["class 1"], count=10, start=50)
    after = learner.learn(before.model, before.samples, more, Checkpoint(None), silent_progress())
    assert not same(after.model.tasks[0].head, before.model.tasks[0].head)
    assert np.isfinite(after.model.tasks[0].head.weight).all()


def count_of(model: Model, task: int) -> int:
    gaussians: Gaussians = model.tasks[task].gaussians
    return int(gaussians.counts.sum())


def test_a_first_task_with_two_images_per_class_has_a_threshold() -> None:
    learner = tiny_learner()
    learned = learn_tasks(learner, class_tasks([2], images=2))[0]
    assert np.isfinite(learned.model.novelty.threshold).all()
