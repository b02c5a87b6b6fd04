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


def test_compensation_by_hand() -> None:
    gradient, e = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.0, 1.0, -2.0])
    out = hat.compensate(gradient, e, s=2.0, s_max=10.0)
    # smax / s = 5. At e = 0 both cosh are 1. cosh(1) = 1.543081, cosh(2) = 3.762196, cosh(4) = 27.308233.
    expected = [1 * 5 * 2 / 2, 2 * 5 * 4.762196 / 2.543081, -1 * 5 * 28.308233 / 4.762196]
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5)


def test_compensation_clips_before_cosh_overflows() -> None:
    # s e = 3000 and -3000 are taken as 50 and -50: (cosh(50) + 1) / (cosh(6) + 1), cosh(50) = 2.592353e21.
    out = hat.compensate(torch.full((2,), 1e-20), torch.tensor([6.0, -6.0]), s=500.0)
    np.testing.assert_allclose(out.numpy(), [25.92353 / (math.cosh(6) + 1)] * 2, rtol=1e-5)
    just_below = hat.compensate(torch.tensor([1.0]), torch.tensor([4.9]), s=10.0)
    just_above = hat.compensate(torch.tensor([1.0]), torch.tensor([5.1]), s=10.0)
    assert just_below.item() == pytest.approx(50 * (math.cosh(49) + 1) / (math.cosh(4.9) + 1), rel=1e-4)
    assert just_above.item() == pytest.approx(50 * (math.cosh(50) + 1) / (math.cosh(5.1) + 1), rel=1e-4)


@quick
@given(seeds, st.floats(1 / 500, 500))
def test_compensation_is_the_formula_of_the_hat_paper(seed: int, s: float) -> None:
    rng = np.random.default_rng(seed)
    g, e = rng.normal(size=30), rng.uniform(-6, 6, 30)
    expected = g * 500 / s * (np.cosh(np.clip(s * e, -50, 50)) + 1) / (np.cosh(e) + 1)
    np.testing.assert_allclose(hat.compensate(torch.tensor(g), torch.tensor(e), s).numpy(), expected, rtol=1e-9)


@quick
@given(seeds, st.floats(1 / 500, 3))  # above 3, 1 - sigmoid(s e) loses all digits
def test_a_compensated_gradient_is_that_of_a_mask_at_temperature_one_times_smax(seed: int, s: float) -> None:
    rng = np.random.default_rng(seed)
    upstream, e = torch.tensor(rng.normal(size=30)), torch.tensor(rng.uniform(-6, 6, 30), requires_grad=True)
    (gradient,) = torch.autograd.grad((upstream * hat.soft_mask(e, s)).sum(), e)
    (at_one,) = torch.autograd.grad((upstream * hat.soft_mask(e, 1.0)).sum(), e)
    torch.testing.assert_close(hat.compensate(gradient, e.detach(), s), 500 * at_one, rtol=1e-5, atol=1e-12)


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
