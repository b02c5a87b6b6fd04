"""The heads and class Gaussians of all tasks as stacked arrays: scores of all classes by a few matrix products.

Tasks differ in their numbers of classes and images. Padding all of them to the largest would waste memory and time, so
tasks of similar sizes form a stack each; a typical model has one to three stacks. `Gaussians.scores` and `Head.logits`
are the reference, task by task in float64. Stacks compute the same in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array, Evidence, Floats, FrozenScores, cosine
from models.inference.gaussians import Gaussians

Indices = NDArray[np.int64]
IMAGES_AT_ONCE = 32  # their features under 50 tasks fit in a processor's cache


def similar(sizes: Sequence[tuple[int, ...]]) -> list[Indices]:
    """Groups of indices: the sizes of a group round up to the same powers of two."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, entry in enumerate(sizes):
        groups.setdefault(tuple(max(size - 1, 0).bit_length() for size in entry), []).append(index)
    return [np.array(group, np.int64) for group in groups.values()]


def select(tasks: Array, chosen: Indices) -> Array:
    """The tasks (T, ...) of a stack; without a copy if these are all tasks."""
    return tasks if len(chosen) == len(tasks) else tasks[chosen]


def has_ood(biases: Sequence[Array]) -> bool:
    """Whether heads with these biases have an `ood` output; those of methods without replay have -inf there."""
    return any(np.isfinite(own[-1]) for own in biases)


class StackedScores:
    """Logits, Mahalanobis distances and whitened cosines of all classes, from the features of all tasks."""

    def __init__(self, gaussians: Sequence[Gaussians], weights: Sequence[Array], biases: Sequence[Array]) -> None:
        """`weights` (c_k + 1, d) and `biases` (c_k + 1,) are those of the heads."""
        self._counts = tuple(len(own.means) for own in gaussians)
        self._has_ood = has_ood(biases)
        starts = np.cumsum((0, *self._counts))
        self._stacks = [
            _stack(group, starts, [(gaussians[k], weights[k], biases[k]) for k in group.tolist()])
            for group in similar([(len(own.basis), len(own.means)) for own in gaussians])
        ]

    def evidence(self, features: Array, frozen: FrozenScores) -> Evidence:
        """The evidence of n images with these features (T, n, d) and frozen scores."""
        scores = self.scores(features, len(frozen.distances))
        return Evidence(self._counts, *scores, frozen, has_ood=self._has_ood)

    def scores(self, features: Array, n: int | None = None) -> tuple[Floats, Floats, Floats, Floats]:
        """Class logits (n, C), `ood` logits (n, T), distances and cosines (n, C)."""
        n, classes, tasks = n if n is not None else features.shape[1], sum(self._counts), len(self._counts)
        logits, distances, cosines = (np.empty((n, classes)) for _ in range(3))
        ood = np.empty((n, tasks))
        for start in range(0, n, IMAGES_AT_ONCE):
            rows = slice(start, start + IMAGES_AT_ONCE)
            for stack in self._stacks:
                at = stack.columns
                logits[rows, at], ood[rows, stack.tasks], distances[rows, at], cosines[rows, at] = stack.scores(
                    select(features[:, rows], stack.tasks)
                )
        return logits, ood, distances, cosines


class _Stack(NamedTuple):
    """G tasks with at most r directions of variance and c classes each, and D classes together.

    `rows` has for each task the basis of its scatter, scaled to the part of the variance above the floor, the whitened
    class means, and the head; those that a task does not have are 0.
    """

    tasks: Indices  # (G,)
    columns: Indices  # (D,), of all classes
    places: Indices  # (D,), of (task, class) in a flat array of G times c entries
    of_task: Indices  # (D,), the task within the stack
    rank: int  # r
    size: int  # c
    centre: Array  # (G, 1, d), the mean of the class means
    rows: Array  # (G, r + c + c + 1, d)
    bias: Floats  # (D,)
    ood_bias: Floats  # (G,)
    squares: Floats  # (D,), squared length of the whitened means
    floor: Floats  # (G,)

    def scores(self, features: Array) -> tuple[Floats, Floats, Floats, Floats]:
        """Class logits (n, D), `ood` logits (n, G), distances and cosines (n, D) for features (G, n, d)."""
        x: Array = features - self.centre
        out: Array = x @ self.rows.transpose(0, 2, 1)
        r, c = self.rank, self.size
        inside = np.einsum("gnr,gnr->ng", out[..., :r], out[..., :r])
        lengths = (np.einsum("gnd,gnd->ng", x, x) - inside).astype(np.float64) / self.floor
        products = self._flat(out[..., r : r + c]) / self.floor[self.of_task]
        per_class = lengths[:, self.of_task]
        distances = np.sqrt(np.maximum(per_class + self.squares - 2 * products, 0.0))
        return (
            self._flat(out[..., r + c : r + 2 * c]) + self.bias,
            out[..., -1].T + self.ood_bias,
            distances,
            cosine(products, per_class, self.squares),
        )

    def _flat(self, values: Array) -> Floats:
        """(G, n, c) -> (n, D)"""
        g, n, c = values.shape
        return values.transpose(1, 0, 2).reshape(n, g * c)[:, self.places].astype(np.float64)


def _stack(tasks: Indices, starts: Indices, parts: Sequence[tuple[Gaussians, Array, Array]]) -> _Stack:
    counts = np.array([len(gaussians.means) for gaussians, _, _ in parts])
    r, c = max(len(gaussians.basis) for gaussians, _, _ in parts), int(counts.max())
    d = parts[0][0].means.shape[1]
    rows, centre = np.zeros((len(parts), r + 2 * c + 1, d), np.float32), np.zeros((len(parts), 1, d), np.float32)
    biases, ood_bias, squares, floor = [], [], [], []
    for g, (gaussians, weight, bias) in enumerate(parts):
        fixed, own = gaussians.fixed, len(gaussians.means)
        scaled = gaussians.basis * fixed.weights[:, None]
        centre[g, 0] = fixed.centre
        rows[g, : len(scaled)] = scaled
        rows[g, r : r + own] = fixed.means - fixed.projected @ scaled
        rows[g, r + c : r + c + own], rows[g, -1] = weight[:-1], weight[-1]
        shifted = weight.astype(np.float64) @ fixed.centre + bias
        biases.append(shifted[:-1])
        ood_bias.append(shifted[-1])
        squares.append(fixed.squares)
        floor.append(fixed.floor)
    of_task = np.repeat(np.arange(len(parts)), counts)
    within = np.arange(len(of_task)) - np.repeat(np.cumsum(counts) - counts, counts)
    return _Stack(
        tasks=tasks,
        columns=starts[tasks][of_task] + within,
        places=of_task * c + within,
        of_task=of_task,
        rank=r,
        size=c,
        centre=centre,
        rows=rows,
        bias=np.concatenate(biases),
        ood_bias=np.array(ood_bias),
        squares=np.concatenate(squares),
        floor=np.array(floor),
    )
