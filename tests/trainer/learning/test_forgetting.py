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

import trainer.learning.train_task
from models.inference.model import Gaussians, Model, SharedAdapters, TaskModel
from models.inference.stored_model import model_tensors
from models.network import hat
from models.network.adapted_blocks import Masks, TaskTensors, apply_masks, tensors_of
from models.network.backbone import Backbone
from tests.support.tiny_model import (
    DIMENSIONS,
    TOKENS,
    TinyImages,
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
from trainer.learning.tokens import TokenCache
from trainer.learning.train_task import ADAPTER_TENSORS, _TaskNetwork

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


def any_tokens(seed: int = 7, scale: float = 1.0) -> Tensor:
    """Four inputs outside every training set."""
    return scale * torch.randn(4, TOKENS, DIMENSIONS, generator=torch.Generator().manual_seed(seed))


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
        patch.object(trainer.learning.train_task, "apply_masks", recording),
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
            assert same(old.head, new.head) == (not back_update)
            assert np.isfinite(new.head.weight).all()


def test_adapters_grow_when_a_layer_is_nearly_full_and_not_before() -> None:
    tight = learn_tasks(tiny_learner(grow_when_used=0.3), class_tasks([1, 1]))
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


def half_used(seed: int = 0) -> SharedAdapters:
    rng = np.random.default_rng(seed)
    start = initial_adapters(tiny_backbone().adapters, DIMENSIONS, tiny_settings())
    used1 = rng.integers(0, 2, start.used1.shape).astype(np.float32)
    return SharedAdapters(start.adapters, used1, rng.integers(0, 2, start.used2.shape).astype(np.float32))


def loss_of(network: _TaskNetwork, backbone: Backbone, labels: Tensor) -> Tensor:
    z = backbone.blocks(any_tokens(), network.tensors, network.masks(1.0))
    return F.cross_entropy(F.linear(z, network.parameters["head_w"], network.parameters["head_b"]), labels)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.1]))
def test_a_step_changes_free_entries_and_no_bit_of_protected_ones(seed: int, momentum: float, decay: float) -> None:
    backbone, shared = tiny_backbone(), half_used(seed)
    chosen = tiny_settings(momentum=momentum, weight_decay=decay, learning_rate=0.1)
    network = _TaskNetwork(TokenCache(backbone, TinyImages().read), shared, 2, chosen, "test")
    start = {key: network.parameters[key].detach().clone() for key in ADAPTER_TENSORS}
    for step in range(15):
        loss = loss_of(network, backbone, torch.tensor([0, 1, 2, step % 3]))
        # A gradient for every entry: a unit that no input activates has none of its own.
        network.step(loss + 0.1 * sum(network.parameters[key].sum() for key in ADAPTER_TENSORS))
    protected = hat.protection(torch.tensor(shared.used1), torch.tensor(shared.used2))
    for key in ADAPTER_TENSORS:
        kept = protected[key].expand_as(start[key])
        now = network.parameters[key].detach()
        assert torch.equal(now[kept], start[key][kept]), key
        assert (now[~kept] != start[key][~kept]).all(), key


def test_existing_momentum_does_not_change_protected_entries() -> None:
    backbone, shared = tiny_backbone(), half_used()
    network = _TaskNetwork(
        TokenCache(backbone, TinyImages().read), shared, 2, tiny_settings(momentum=0.9, weight_decay=0.1), "test"
    )
    state = network.state()
    network.restore(state | {f"momentum.{key}": np.ones_like(value) for key, value in state.items()})
    before = {key: network.parameters[key].detach().clone() for key in ADAPTER_TENSORS}
    network.step(network.parameters["head_b"].sum())  # a loss that does not depend on the adapters
    for key in ADAPTER_TENSORS:
        kept = network.protected[key].expand_as(before[key])
        assert torch.equal(network.parameters[key].detach()[kept], before[key][kept])


def test_weight_decay_changes_weights_but_no_masks_norms_or_biases() -> None:
    backbone, shared = tiny_backbone(), half_used()
    chosen = tiny_settings(momentum=0.0, weight_decay=0.1, learning_rate=0.5)
    network = _TaskNetwork(TokenCache(backbone, TinyImages().read), shared, 2, chosen, "test")
    with torch.no_grad():  # biases start at zero, where decay has no effect
        for parameter in network.parameters.values():
            parameter += 0.5
    before = {key: value.detach().clone() for key, value in network.parameters.items()}
    network.step(0.0 * sum(value.sum() for value in network.parameters.values()))  # all gradients are zero
    for key, old in before.items():
        kept = network.protected[key].expand_as(old) if key in network.protected else torch.zeros_like(old, dtype=bool)
        decayed = key in ("w1", "w2", "head_w")
        expected = (
            torch.where(kept, old, old * (1 - 0.5 * 0.1))
            if decayed
            else old.clamp(-6, 6)
            if key in ("e1", "e2")
            else old
        )
        torch.testing.assert_close(network.parameters[key].detach(), expected, rtol=1e-6, atol=0)


def test_embeddings_are_clipped_to_where_the_sigmoid_has_a_gradient() -> None:
    backbone = tiny_backbone()
    network = _TaskNetwork(
        TokenCache(backbone, TinyImages().read), half_used(), 2, tiny_settings(learning_rate=10.0), "test"
    )
    for _ in range(5):
        network.step(loss_of(network, backbone, torch.tensor([0, 1, 2, 0])))
    for key in ("e1", "e2"):
        assert network.parameters[key].abs().max() <= 6


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
