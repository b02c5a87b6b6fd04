"""Linear heads on fixed features: a convex problem per head, solved for all heads at once.

    minimise over W, b   sum_i w_i CE(W z_i + b, y_i) + ridge / 2 (|W - W0|^2 + |b - b0|^2)

W0, b0 is the given head: separable classes have no optimum without the ridge. L-BFGS runs on all heads side by side,
each with a step of its own. Logits are linear along a line, so a step costs two products with the features.
**The same problems give the same heads.**
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.inference.model import Head

TOLERANCE = 1e-4  # largest entry of the gradient at a solution
MAX_STEPS = 300
HISTORY = 10  # changes that L-BFGS remembers
STACK_BYTES = 128 * 2**20  # features of the heads that are solved together
SUFFICIENT = 1e-4  # Armijo's condition: the least decrease of a step, relative to that of the tangent
ROUNDING = 2e-7  # relative, of a loss in float32: an increase by as much is accepted
SHORTEST = 1e-4  # a step that must be shorter is at the limit of float32


@dataclass(frozen=True)
class HeadProblem:
    """What a head is to classify: n images."""

    head: Head  # where to start, and what the ridge draws toward
    features: NDArray[np.float32]  # (n, d)
    labels: NDArray[np.int64]  # (n,), rows of the head
    weights: NDArray[np.float64]  # (n,), their sum is 1
    ridge: float


def solve_heads(problems: Iterable[HeadProblem], tolerance: float = TOLERANCE) -> Iterator[Head]:
    """The optimal head of each problem, in order; a head without images stays as it is."""
    for group in _groups(problems):
        stack = _Stack(group)
        yield from stack.heads(_minimise(stack, tolerance))


def solved_head(features: NDArray[np.float32], labels: NDArray[np.int64], outputs: int, ridge: float) -> Head:
    """The head that the features of a task's images determine; each output that has images weighs the same.

    `ridge` is multiplied by the mean squared length of a feature.
    """
    counts = np.bincount(labels, minlength=outputs)
    empty = Head(np.zeros((outputs, features.shape[1]), np.float32), np.zeros(outputs, np.float32))
    length = float((features**2).sum(axis=1).mean())
    weights = 1 / (np.count_nonzero(counts) * counts[labels])
    (solved,) = solve_heads([HeadProblem(empty, features, labels, weights, ridge * length)])
    return solved


def _groups(problems: Iterable[HeadProblem]) -> Iterator[list[HeadProblem]]:
    """Consecutive problems whose padded features fit in the memory of a stack."""
    group: list[HeadProblem] = []
    for problem in problems:
        largest = max(other.features.nbytes for other in (*group, problem))
        if group and largest * (len(group) + 1) > STACK_BYTES:
            yield group
            group = []
        group.append(problem)
    if group:
        yield group


class _Stack:
    """H problems, padded to n images and C outputs. The parameters of all heads are (H, C, d + 1), bias last."""

    def __init__(self, problems: Sequence[HeadProblem]) -> None:
        self._problems = problems
        self._ridge = torch.tensor([problem.ridge for problem in problems], dtype=torch.float32)
        h, d = len(problems), problems[0].features.shape[1]
        n, c = max(len(p.labels) for p in problems), max(len(p.head.bias) for p in problems)
        self._features = torch.zeros(h, n, d + 1)
        self._targets, self._weights = torch.zeros(h, n, c), torch.zeros(h, n, 1)
        self._absent = torch.zeros(h, 1, c)  # -inf for outputs that a head does not have
        self.start = torch.zeros(h, c, d + 1)
        for k, problem in enumerate(problems):
            rows, outputs = len(problem.labels), len(problem.head.bias)
            self._features[k, :rows, :d] = torch.from_numpy(problem.features)
            self._features[k, :rows, d] = 1
            self._targets[k, torch.arange(rows), torch.from_numpy(problem.labels)] = 1
            self._weights[k, :rows, 0] = torch.from_numpy(problem.weights)
            self._absent[k, 0, outputs:] = -torch.inf
            self.start[k, :outputs, :d] = torch.from_numpy(problem.head.weight)
            self.start[k, :outputs, d] = torch.from_numpy(problem.head.bias)

    def logits(self, parameters: Tensor) -> Tensor:
        """(H, C, d + 1) -> (H, n, C); also of a direction, because they are linear."""
        return torch.bmm(self._features, parameters.transpose(1, 2))

    def gradient(self, parameters: Tensor, logits: Tensor) -> Tensor:
        error = (torch.softmax(logits + self._absent, dim=2) - self._targets) * self._weights
        return torch.bmm(error.transpose(1, 2), self._features) + self._ridge[:, None, None] * (parameters - self.start)

    def value(self, parameters: Tensor, logits: Tensor) -> Tensor:
        """The objective of each head: (H,)."""
        losses = torch.logsumexp(logits + self._absent, dim=2) - (logits * self._targets).sum(dim=2)
        away = (parameters - self.start).double().pow(2).sum(dim=(1, 2))
        return (losses * self._weights[:, :, 0]).double().sum(dim=1) + self._ridge / 2 * away

    def curvature(self, direction: Tensor, logits: Tensor, change: Tensor) -> Tensor:
        """The second derivative along a direction whose logits are `change`: (H,)."""
        p = torch.softmax(logits + self._absent, dim=2)
        mean = (p * change).sum(dim=2, keepdim=True)
        variance = (p * (change - mean) ** 2).sum(dim=2) * self._weights[:, :, 0]
        return variance.sum(dim=1) + self._ridge * direction.pow(2).sum(dim=(1, 2))

    def heads(self, parameters: Tensor) -> list[Head]:
        heads = []
        for problem, rows in zip(self._problems, parameters.numpy(), strict=True):
            own = rows[: len(problem.head.bias)]
            heads.append(Head(own[:, :-1].copy(), own[:, -1].copy()))
        return heads


def _minimise(stack: _Stack, tolerance: float) -> Tensor:
    """L-BFGS from the given heads until no entry of any gradient exceeds the tolerance."""
    x = stack.start.clone()
    logits = stack.logits(x)
    value, gradient = stack.value(x, logits), stack.gradient(x, logits)
    changes: list[tuple[Tensor, Tensor]] = []  # of parameters and of gradients
    for _ in range(MAX_STEPS):
        if float(gradient.abs().max()) <= tolerance:
            break
        direction = -_inverse_hessian_product(gradient, changes)
        slope = _dot(gradient, direction)
        along = stack.logits(direction)
        # The exact minimum of the parabola at the start of the line: a first guess, right near the optimum.
        step = -slope / stack.curvature(direction, logits, along).clamp(min=1e-12)
        while True:
            moved, new_logits = x + step[:, None, None] * direction, logits + step[:, None, None] * along
            new_value = stack.value(moved, new_logits)
            too_far = new_value > value + SUFFICIENT * step * slope + ROUNDING * (1 + value)
            if not too_far.any():
                break
            step = torch.where(too_far, torch.where(step.abs() > SHORTEST, step / 2, torch.zeros_like(step)), step)
            if not bool((step > 0).any()):
                return x
        new_gradient = stack.gradient(moved, new_logits)
        changes = [*changes, (moved - x, new_gradient - gradient)][-HISTORY:]
        x, logits, value, gradient = moved, new_logits, new_value, new_gradient
    return x


def _inverse_hessian_product(gradient: Tensor, changes: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The two loops of L-BFGS, for each head."""
    out, shares = gradient.clone(), []
    for moved, bent in reversed(changes):
        curvature = _dot(moved, bent)
        rho = torch.where(curvature > 0, 1 / curvature, torch.zeros_like(curvature))  # 0: this head did not move
        share = rho * _dot(moved, out)
        out -= share[:, None, None] * bent
        shares.append((rho, share))
    if changes:
        moved, bent = changes[-1]
        scale = _dot(moved, bent) / _dot(bent, bent).clamp(min=1e-30)
        out *= torch.where(scale > 0, scale, torch.ones_like(scale))[:, None, None]
    for (moved, bent), (rho, share) in zip(changes, reversed(shares), strict=True):
        out += (share - rho * _dot(bent, out))[:, None, None] * moved
    return out


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """(H,)"""
    return (a * b).sum(dim=(1, 2))
