import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.network import hat
from models.network.adapted_blocks import Masks, TaskTensors, adapter, apply_masks

quick = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def test_the_temperature_rises_in_equal_steps_from_one_over_smax_to_smax() -> None:
    assert hat.temperature(0, 3, s_max=4) == 0.25
    assert hat.temperature(1, 3, s_max=4) == 2.125  # half-way between 0.25 and 4
    assert hat.temperature(2, 3, s_max=4) == 4
    assert hat.temperature(0, 11) == 1 / 500
    assert hat.temperature(10, 11) == pytest.approx(500)


def test_the_geometric_temperature_rises_by_equal_factors_between_the_same_ends() -> None:
    rising = [hat.temperature(step, 5, "geometric", s_max=16) for step in range(5)]
    assert rising == pytest.approx([1 / 16, 1 / 4, 1, 4, 16])
    assert hat.temperature(0, 1, "geometric") == pytest.approx(500)


def test_the_last_step_of_an_epoch_has_hard_masks_even_if_it_is_the_only_step() -> None:
    # At 1/smax every mask would be sigmoid(e / 500), about one half, instead of the 0 or 1 that the learned task uses.
    assert hat.temperature(0, 1) == pytest.approx(500)


def test_a_soft_mask_is_the_sigmoid_of_s_times_e() -> None:
    mask = hat.soft_mask(torch.tensor([0.0, 1.0, -1.0, 3.0]), 2.0)
    expected = [0.5, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 1 / (1 + math.exp(-6))]
    np.testing.assert_allclose(mask.numpy(), expected, rtol=1e-6)


def test_hard_masks_are_exactly_zero_or_one() -> None:
    mask = hat.hard_mask(torch.tensor([-6.0, -1e-30, 0.0, 1e-30, 6.0]))
    assert mask.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert mask.dtype == torch.float32


@quick
@given(seeds)
def test_the_soft_mask_becomes_the_hard_one_at_smax(seed: int) -> None:
    e = torch.from_numpy(np.random.default_rng(seed).uniform(0.05, 6, 20).astype(np.float32))
    e = torch.cat([e, -e])
    np.testing.assert_allclose(hat.soft_mask(e, hat.S_MAX).numpy(), hat.hard_mask(e).numpy(), atol=1e-6)


def mask_gradient(upstream: Tensor, embedding: Tensor, s: float) -> Tensor:
    """dL/de for L = sum(upstream * mask)."""
    embedding = embedding.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((upstream * hat.soft_mask(embedding, s)).sum(), embedding)
    return gradient


def test_the_gradient_of_a_mask_by_hand() -> None:
    # sigmoid'(0) = 0.25, sigmoid'(1) = 0.196612, sigmoid'(-2) = 0.104994; all times smax = 500.
    gradient = mask_gradient(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.0, 1.0, -2.0]), s=2.0)
    np.testing.assert_allclose(gradient.numpy(), [125.0, 196.612, -52.497], rtol=1e-5)


@quick
@given(seeds, st.floats(1 / 500, 3))  # above 3, cosh(s e) and 1 - sigmoid(s e) lose digits
def test_the_gradient_of_a_mask_is_the_compensated_one_of_the_hat_paper(seed: int, s: float) -> None:
    rng = np.random.default_rng(seed)
    upstream, e = rng.normal(size=30), rng.uniform(-6, 6, 30)
    a = 1 / (1 + np.exp(-s * e))
    plain = upstream * s * a * (1 - a)
    expected = plain * 500 / s * (np.cosh(s * e) + 1) / (np.cosh(e) + 1)
    gradient = mask_gradient(torch.tensor(upstream), torch.tensor(e), s)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("s", [1 / 500, 1.0, 26.0, 500.0])
def test_the_gradient_of_a_hard_mask_does_not_vanish_in_float32(s: float) -> None:
    e = torch.tensor([-6.0, -1.0, 0.0, 1.0, 6.0])
    gradient = mask_gradient(torch.ones(5), e, s)
    assert gradient.dtype == torch.float32
    # sigmoid'(e) = 1 / (2 (cosh(e) + 1))
    np.testing.assert_allclose(gradient.numpy(), 500 / (2 * (np.cosh(e.numpy()) + 1)), rtol=1e-4)


def test_an_inactive_bottleneck_unit_has_a_gradient() -> None:
    """relu(m1 * h) has none where m1 is exactly 0, although m1 * relu(h) is equal."""
    task = random_task(np.random.default_rng(0), 1, 3, 4)
    task = task._replace(b1=torch.full((1, 3), 10.0, dtype=torch.float64))  # active before the mask
    m1 = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    masks = Masks(m1, torch.ones(1, 4, dtype=torch.float64))
    adapter(torch.ones(2, 4, dtype=torch.float64), task, 0, masks).sum().backward()  # type: ignore[no-untyped-call]
    assert m1.grad is not None
    assert (m1.grad != 0).all()


def test_sparsity_by_hand() -> None:
    masks = [torch.tensor([[1.0, 0.5, 0.25]]), torch.tensor([[0.5, 1.0]])]
    used = [torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    # Two units of the first layer are free (used by 0.5 and 0.25), and one of the second (0.5): 1.25 of 3.
    assert hat.sparsity(masks, used).item() == pytest.approx(1.25 / 3)


def test_units_of_earlier_tasks_do_not_count_as_used() -> None:
    full = [torch.ones(2, 3), torch.ones(2, 4)]
    assert hat.sparsity([torch.ones(2, 3), torch.ones(2, 4)], full).item() == 0


def test_sparsity_is_one_for_a_first_task_that_uses_every_unit() -> None:
    masks = [torch.ones(2, 3), torch.ones(2, 4)]
    assert hat.sparsity(masks, [torch.zeros(2, 3), torch.zeros(2, 4)]).item() == 1


def test_protection_by_hand() -> None:
    used1 = torch.tensor([[1.0, 0.0]])  # the first of two bottleneck units is used
    used2 = torch.tensor([[0.0, 1.0, 1.0]])  # the last two of three outputs are used
    protected = hat.protection(used1, used2)
    assert protected["w1"].expand(1, 2, 3).tolist() == [[[True, True, True], [False, False, False]]]
    assert protected["b1"].tolist() == [[True, False]]
    assert protected["w2"].tolist() == [[[False, False], [True, False], [True, False]]]  # min(m2, m1)
    assert protected["b2"].tolist() == [[False, True, True]]


@quick
@given(seeds)
def test_protection_is_the_minimum_of_the_two_cumulative_masks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    used1, used2 = rng.integers(0, 2, (2, 4)).astype(np.float32), rng.integers(0, 2, (2, 3)).astype(np.float32)
    protected = hat.protection(torch.from_numpy(used1), torch.from_numpy(used2))
    for a in range(2):
        for i in range(3):
            for j in range(4):
                assert protected["w2"][a, i, j].item() == (min(used2[a, i], used1[a, j]) == 1)


def random_task(rng: np.random.Generator, adapters: int, bottleneck: int, d: int) -> TaskTensors:
    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    a, b = adapters, bottleneck
    return TaskTensors(normal(a, b, d), normal(a, b), normal(a, d, b), normal(a, d), normal(a + 1, d), normal(a + 1, d))


@quick
@given(seeds, st.integers(1, 3), st.integers(1, 7), st.integers(1, 6), st.floats(0, 1))
def test_a_folded_task_equals_its_masked_adapters(seed: int, adapters: int, bottleneck: int, d: int, p: float) -> None:
    rng = np.random.default_rng(seed)
    task = random_task(rng, adapters, bottleneck, d)
    m1 = torch.from_numpy((rng.random((adapters, bottleneck)) < p).astype(np.float64))
    m2 = torch.from_numpy((rng.random((adapters, d)) < p).astype(np.float64))
    folded = apply_masks(task, m1, m2)
    assert folded.w1.shape == (adapters, max(1, int(m1.sum(1).max())), d)
    x = torch.from_numpy(rng.normal(size=(5, d)))
    for index in range(adapters):
        masked = adapter(x, task, index, Masks(m1, m2))
        torch.testing.assert_close(adapter(x, folded, index, None), masked, rtol=1e-12, atol=1e-12)
        unused = (m2[index] == 0).nonzero().flatten()
        assert torch.equal(masked[:, unused], x[:, unused])  # the masks do not apply to the skip connection


def test_a_task_that_uses_no_unit_is_the_frozen_network() -> None:
    task = random_task(np.random.default_rng(0), 2, 4, 3)
    folded, x = apply_masks(task, torch.zeros(2, 4), torch.zeros(2, 3)), torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(adapter(x, folded, 1, None), x)
    assert torch.equal(folded.norm_w, task.norm_w)


def test_an_adapter_by_hand() -> None:
    task = TaskTensors(
        w1=torch.tensor([[[1.0, 0.0], [0.0, -1.0]]]),
        b1=torch.tensor([[1.0, 0.0]]),
        w2=torch.tensor([[[2.0, 1.0], [0.0, 3.0]]]),
        b2=torch.tensor([[0.5, -1.0]]),
        norm_w=torch.ones(2, 2),
        norm_b=torch.zeros(2, 2),
    )
    x = torch.tensor([[1.0, 2.0]])
    # W1 x + b1 = (2, -2), relu (2, 0); W2 h + b2 = (4.5, -1); with the skip connection (5.5, 1).
    assert adapter(x, task, 0, None).tolist() == [[5.5, 1.0]]
    # m1 halves the first unit: h = (1, 0), W2 h + b2 = (2.5, -1); m2 multiplies the second output by a quarter.
    masks = Masks(torch.tensor([[0.5, 1.0]]), torch.tensor([[1.0, 0.25]]))
    assert adapter(x, task, 0, masks).tolist() == [[3.5, 1.75]]
