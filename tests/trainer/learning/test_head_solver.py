from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.inference.evidence import log_softmax
from models.inference.model import Head
from trainer.learning import head_solver
from trainer.learning.head_solver import TOLERANCE, HeadProblem, solve_heads


def problem(images: int, classes: int, size: int = 6, seed: int = 0, ridge: float = 0.1) -> HeadProblem:
    """Random classes; with more dimensions than images they are separable."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=images)
    features = rng.normal(size=(classes, size))[labels] + rng.normal(size=(images, size))
    head = Head(rng.normal(size=(classes, size)).astype(np.float32), rng.normal(size=classes).astype(np.float32))
    weights = rng.uniform(0.5, 1.5, images)
    return HeadProblem(head, features.astype(np.float32), labels, weights / max(weights.sum(), 1e-9), ridge)


def gradient(p: HeadProblem, head: Head) -> np.ndarray:
    """Of the objective, in float64: (C, d + 1)."""
    error = (np.exp(log_softmax(head.logits(p.features))) - np.eye(len(head.bias))[p.labels]) * p.weights[:, None]
    rows = np.column_stack([p.features, np.ones(len(p.labels))]).astype(np.float64)
    return error.T @ rows + p.ridge * (parameters(head) - parameters(p.head))


def parameters(head: Head) -> np.ndarray:
    return np.column_stack([head.weight, head.bias]).astype(np.float64)


@settings(max_examples=30, deadline=None)
@given(
    images=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    classes=st.integers(2, 5),
    size=st.integers(1, 80),
    ridge=st.sampled_from([0.003, 0.1, 1.0]),
)
def test_every_head_is_at_its_optimum_to_the_tolerance(
    images: list[int], classes: int, size: int, ridge: float
) -> None:
    problems = [problem(n, classes, size, seed=k, ridge=ridge) for k, n in enumerate(images)]
    for p, head in zip(problems, solve_heads(problems), strict=True):
        assert np.abs(gradient(p, head)).max() <= 2 * TOLERANCE  # float32 inside


@pytest.mark.parametrize(
    ("images", "classes", "size", "seed", "ridge"),
    [(1, 5, 57, 43, 1.0), (1, 3, 10, 32, 0.1), (1, 5, 64, 9, 1.0), (5, 3, 50, 45, 1.0), (1, 2, 42, 1, 1.0)],
)
def test_steps_whose_decrease_is_lost_in_rounding_are_taken(
    images: int, classes: int, size: int, seed: int, ridge: float
) -> None:
    """Where none is taken, the gradient stays at two to seven times the tolerance."""
    p = problem(images, classes, size, seed=seed, ridge=ridge)
    (head,) = solve_heads([p])
    assert np.abs(gradient(p, head)).max() <= 1.2 * TOLERANCE


def test_a_head_does_not_depend_on_the_heads_that_are_solved_beside_it() -> None:
    """Heads are padded to the largest number of images and of outputs."""
    problems = [problem(30, 3, seed=1), problem(7, 2, seed=2), problem(50, 5, seed=3)]
    together = list(solve_heads(problems, 1e-5))
    for p, beside in zip(problems, together, strict=True):
        (alone,) = solve_heads([p], 1e-5)
        assert beside.weight.shape == p.head.weight.shape
        np.testing.assert_allclose(parameters(beside), parameters(alone), atol=1e-3)


def test_stacks_are_bounded_in_memory_and_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [problem(n, 3, seed=n) for n in (40, 3, 40, 8, 1)]
    expected = list(solve_heads(problems, 1e-5))
    stacks: list[int] = []
    start = head_solver._Stack.__init__

    def counting(self: head_solver._Stack, group: list[HeadProblem]) -> None:
        stacks.append(max(p.features.nbytes for p in group) * len(group))
        start(self, group)

    monkeypatch.setattr(head_solver._Stack, "__init__", counting)
    monkeypatch.setattr(head_solver, "STACK_BYTES", 2 * 40 * 6 * 4)
    for head, same in zip(solve_heads(problems, 1e-5), expected, strict=True):
        np.testing.assert_allclose(parameters(head), parameters(same), atol=1e-3)
    assert len(stacks) == 3
    assert max(stacks) <= head_solver.STACK_BYTES


def test_the_same_problems_give_the_same_bits() -> None:
    problems = [problem(40, 3, 100, seed=1), problem(30, 2, 100, seed=2)]
    for one, two in zip(solve_heads(problems), solve_heads(problems), strict=True):
        assert np.array_equal(parameters(one), parameters(two))


def test_a_strong_ridge_keeps_the_given_head_and_a_weak_one_fits_the_images() -> None:
    p = problem(40, 3, 100)
    kept, fitted = solve_heads([replace(p, ridge=ridge) for ridge in (1e4, 1e-3)])
    assert np.abs(parameters(kept) - parameters(p.head)).max() < 1e-3
    assert (p.head.logits(p.features).argmax(axis=1) == p.labels).mean() < 0.8
    assert (fitted.logits(p.features).argmax(axis=1) == p.labels).all()


def test_a_head_without_images_stays_beside_one_with_images() -> None:
    empty, other = problem(0, 3, seed=1), problem(20, 3, seed=2)
    heads = list(solve_heads([empty, other]))
    assert np.array_equal(parameters(heads[0]), parameters(empty.head))
    assert not np.array_equal(parameters(heads[1]), parameters(other.head))


def test_features_far_from_zero_are_solved_too() -> None:
    """Features of a CNN have a mean much larger than their spread."""
    p = problem(60, 3, 20)
    moved = replace(p, features=p.features + 5)
    (head,) = solve_heads([moved])
    assert np.abs(gradient(moved, head)).max() <= 2 * TOLERANCE
