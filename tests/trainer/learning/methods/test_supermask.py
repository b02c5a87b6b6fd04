"""Edge Popup and supermasks against short separate transcriptions in numpy."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.inference.stored_model import model_tensors
from models.inference.supermask import Supermask, fixed_weights
from models.network.adapted_blocks import tensors_of
from tests.support.tiny_model import DIMENSIONS, class_tasks, learn_tasks, tiny_learner
from trainer.learning.methods.supermask import top_mask

SIGNS = [1, 1, -1, 1, -1, 1, -1, 1, 1, -1, 1, 1]  # of the first weights


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.floats(0.05, 0.95))
def test_a_mask_keeps_the_highest_scores_of_each_layer(seed: int, kept: float) -> None:
    scores = np.random.default_rng(seed).normal(size=(2, 5, 7))
    mask = top_mask(torch.tensor(scores), kept).numpy()
    for layer in range(2):
        count = max(1, round(kept * 35))
        ranked = sorted(((scores[layer, i, j], i, j) for i in range(5) for j in range(7)), reverse=True)
        expected = np.zeros((5, 7))
        for _, i, j in ranked[:count]:
            expected[i, j] = 1
        assert np.array_equal(mask[layer], expected)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_the_score_of_every_weight_gets_the_gradient_of_the_masked_weight_times_the_weight(seed: int) -> None:
    """For y = (W * M) x and L = sum(t y): dL/dV_ij = t_i x_j W_ij, also where the mask is 0."""
    rng = np.random.default_rng(seed)
    w, x, t = rng.normal(size=(4, 6)), rng.normal(size=6), rng.normal(size=4)
    scores = torch.tensor(rng.normal(size=(1, 4, 6)), requires_grad=True)
    y = (torch.tensor(w) * top_mask(scores, 0.3)[0]) @ torch.tensor(x)
    (y * torch.tensor(t)).sum().backward()
    assert scores.grad is not None
    np.testing.assert_allclose(scores.grad[0].numpy(), np.outer(t, x) * w, rtol=1e-12)


def test_fixed_weights_are_signed_constants_of_kaiming() -> None:
    w1, w2 = fixed_weights(2, 64, 40, 0.32, 0.5)
    np.testing.assert_allclose(np.abs(w1), np.sqrt(2 / (0.32 * 40)), rtol=1e-6)
    np.testing.assert_allclose(np.abs(w2), 0.5 * np.sqrt(2 / (0.32 * 64)), rtol=1e-6)
    for weights in (w1, w2):
        assert abs(np.sign(weights).mean()) < 0.05
    # These signs must never change: stored masks refer to them.
    assert np.sign(w1[0, 0, :12]).astype(int).tolist() == SIGNS


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 9))
def test_a_packed_mask_gives_the_masked_weights(seed: int, units: int, dimensions: int) -> None:
    rng = np.random.default_rng(seed)
    mask1, mask2 = rng.random((2, units, dimensions)) < 0.3, rng.random((2, dimensions, units)) < 0.3
    packed = Supermask.pack(mask1, mask2, 0.32, 1.0)
    assert packed.mask1.nbytes == -(-mask1.size // 8)
    again = Supermask.from_tensors(packed.tensors())
    assert again is not None
    w1, w2 = fixed_weights(2, units, dimensions, 0.32, 1.0)
    assert np.array_equal(again.adapters().w1, np.where(mask1, w1, 0))
    assert np.array_equal(again.adapters().w2, np.where(mask2, w2, 0))


def test_a_task_stores_one_bit_per_weight_and_no_weights() -> None:
    learner = tiny_learner(method="sup-csi", supermask_units=16)
    model = learn_tasks(learner, class_tasks([2]))[0].model
    tensors = {name: array for name, array in model_tensors(model).items() if name.startswith("task.0/")}
    assert not {"task.0/w1", "task.0/w2"} & tensors.keys()
    weights = learner.backbone.adapters * 16 * DIMENSIONS
    assert tensors["task.0/supermask.mask1"].nbytes == tensors["task.0/supermask.mask2"].nbytes == weights // 8
    assert model.shared.bottleneck == 0


@pytest.mark.parametrize("method", ["hat-csi", "sup-csi"])
def test_a_later_task_changes_no_bit_of_earlier_features_and_heads(method: str) -> None:
    learner = tiny_learner(method=method, learning_rate=0.2)
    steps = learn_tasks(learner, class_tasks([2, 3, 2], images=5))
    keys = [f"fresh/{number}" for number in range(6)]
    for early, late in pairwise(steps):
        for old, new in zip(early.model.tasks, late.model.tasks, strict=False):
            pair = [learner.tokens.features(keys, tensors_of(task)) for task in (old, new)]
            assert np.array_equal(*pair)
            assert np.array_equal(old.head.weight, new.head.weight)
            assert old.head.turned_weight is not None
            assert np.array_equal(old.head.turned_weight, new.head.turned_weight)


def test_the_masks_of_tasks_differ() -> None:
    learner = tiny_learner(method="sup-csi", epochs=6, learning_rate=0.1)
    model = learn_tasks(learner, class_tasks([2, 2], images=8))[-1].model
    one, other = (task.supermask for task in model.tasks)
    assert one is not None
    assert other is not None
    assert (np.unpackbits(one.mask1) != np.unpackbits(other.mask1)).mean() > 0.05
