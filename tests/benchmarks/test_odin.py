"""ODIN's step against a separate transcription in numpy."""

import numpy as np
import pytest
import torch

from benchmarks.accuracy.odin import perturbed


@pytest.mark.parametrize("seed", range(5))
def test_the_step_makes_the_best_class_more_certain(seed: int) -> None:
    """For f(x) = W x + b, the gradient of log s_best is (W_best - sum of s_j W_j) / tau."""
    rng = np.random.default_rng(seed)
    w, b, x = rng.normal(size=(4, 6)), rng.normal(size=4), rng.normal(size=(3, 6))
    tau, step = 7.0, 0.03
    expected = []
    for row in x:
        f = (w @ row + b) / tau
        s = np.exp(f) / np.exp(f).sum()
        gradient = (w[f.argmax()] - s @ w) / tau
        expected.append(row - step * np.sign(-gradient))
    weight, bias = torch.tensor(w), torch.tensor(b)
    found = perturbed(torch.tensor(x), lambda rows: rows @ weight.T + bias, tau, step)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_a_step_of_zero_changes_nothing() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(perturbed(x, lambda rows: rows @ torch.ones(3, 2), 1.0, 0.0), x)
