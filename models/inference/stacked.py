"""The heads and class Gaussians of all tasks as stacked arrays: scores of all classes by a few matrix products.

Tasks differ in their numbers of classes and images. Padding all of them to the largest would waste memory and time, so
tasks of similar sizes form stacks. The Gaussians of a learned task stay: versions share their stacks, and only those of
the last tasks are made for a new version. Its heads are stacked anew. `Gaussians.scores` and `Head.logits` are the
reference, task by task in float64. Stacks compute the same in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array, Evidence, Floats, FrozenScores, cosine
from models.inference.gaussians import Gaussians

Indices = NDArray[np.int64]
IMAGES_AT_ONCE = 32  # their features under 50 tasks fit in a processor's cache
STACKED_TASKS = 16  # at most: a stack that is not full is made again with the next task of its size


def stacked_together(sizes: Sequence[tuple[int, ...]]) -> list[Indices]:
    """The tasks of each stack: their sizes round up to the same powers of two."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, entry in enumerate(sizes):
        groups.setdefault(tuple(max(size - 1, 0).bit_length() for size in entry), []).append(index)
    return [
        np.array(group[start : start + STACKED_TASKS], np.int64)
        for group in groups.values()
        for start in range(0, len(group), STACKED_TASKS)
    ]


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
            _Stack.of(
                group,
                starts[group],
                _gaussian_stack([gaussians[k] for k in group.tolist()]),
                [weights[k] for k in group.tolist()],
                [biases[k] for k in group.tolist()],
            )
            for group in stacked_together([(len(own.basis), len(own.means)) for own in gaussians])
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


@dataclass(frozen=True, eq=False)
class _GaussianStack:
    """The class Gaussians of G tasks with at most r directions of variance and c classes each, and D classes together.

    `rows` has for each task the basis of its scatter, scaled to the part of the variance above the floor, and the
    whitened class means; those that a task does not have are 0.
    """

    tasks: Sequence[Gaussians]  # G
    places: Indices  # (D,), of (task, class) in a flat array of G times c entries
    of_task: Indices  # (D,), the task within the stack
    rank: int  # r
    size: int  # c
    centre: Array  # (G, 1, d), the mean of the class means
    rows: Array  # (G, r + c, d)
    squares: Floats  # (D,), squared length of the whitened means
    floor: Floats  # (G,)

    def scores(self, x: Array) -> tuple[Floats, Floats]:
        """Distances and cosines (n, D) for features less the centre: (G, n, d)."""
        out: Array = x @ self.rows.transpose(0, 2, 1)
        inside = np.einsum("gnr,gnr->ng", out[..., : self.rank], out[..., : self.rank])
        lengths = (np.einsum("gnd,gnd->ng", x, x) - inside).astype(np.float64) / self.floor
        products = self.flat(out[..., self.rank :]) / self.floor[self.of_task]
        per_class = lengths[:, self.of_task]
        distances = np.sqrt(np.maximum(per_class + self.squares - 2 * products, 0.0))
        return distances, cosine(products, per_class, self.squares)

    def flat(self, values: Array) -> Floats:
        """(G, n, c) -> (n, D)"""
        g, n, c = values.shape
        return values.transpose(1, 0, 2).reshape(n, g * c)[:, self.places].astype(np.float64)


# By the identity of their tasks, which a stack keeps alive.
_gaussian_stacks: WeakValueDictionary[tuple[int, ...], _GaussianStack] = WeakValueDictionary()


def _gaussian_stack(tasks: Sequence[Gaussians]) -> _GaussianStack:
    identity = tuple(map(id, tasks))
    if (found := _gaussian_stacks.get(identity)) is None:
        found = _gaussian_stacks[identity] = _new_gaussian_stack(tasks)
    return found


def _new_gaussian_stack(tasks: Sequence[Gaussians]) -> _GaussianStack:
    counts = np.array([len(task.means) for task in tasks])
    r, c, d = max(len(task.basis) for task in tasks), int(counts.max()), tasks[0].means.shape[1]
    rows, centre = np.zeros((len(tasks), r + c, d), np.float32), np.zeros((len(tasks), 1, d), np.float32)
    for g, task in enumerate(tasks):
        fixed = task.fixed
        scaled = task.basis * fixed.weights[:, None]
        centre[g, 0] = fixed.centre
        rows[g, : len(scaled)] = scaled
        rows[g, r : r + len(task.means)] = fixed.means - fixed.projected @ scaled
    of_task = np.repeat(np.arange(len(tasks)), counts)
    within = np.arange(len(of_task)) - np.repeat(np.cumsum(counts) - counts, counts)
    return _GaussianStack(
        tasks=tasks,
        places=of_task * c + within,
        of_task=of_task,
        rank=r,
        size=c,
        centre=centre,
        rows=rows,
        squares=np.concatenate([task.fixed.squares for task in tasks]),
        floor=np.array([task.fixed.floor for task in tasks]),
    )


class _Stack(NamedTuple):
    """Gaussians of G tasks and D classes, and the heads of a version."""

    tasks: Indices  # (G,)
    columns: Indices  # (D,), of all classes
    gaussians: _GaussianStack
    heads: Array  # (G, c + 1, d), `ood` last
    bias: Floats  # (D,), for features less the centre
    ood_bias: Floats  # (G,)

    @classmethod
    def of(
        cls,
        tasks: Indices,
        starts: Indices,
        gaussians: _GaussianStack,
        weights: Sequence[Array],
        biases: Sequence[Array],
    ) -> _Stack:
        """`starts` are the first columns of the tasks."""
        heads = np.zeros((len(tasks), gaussians.size + 1, weights[0].shape[1]), np.float32)
        shifted = []
        for own, weight, bias, task in zip(heads, weights, biases, gaussians.tasks, strict=True):
            own[: len(weight) - 1], own[-1] = weight[:-1], weight[-1]
            shifted.append(weight.astype(np.float64) @ task.fixed.centre + bias)
        within = gaussians.places - gaussians.of_task * gaussians.size
        return cls(
            tasks,
            starts[gaussians.of_task] + within,
            gaussians,
            heads,
            np.concatenate([own[:-1] for own in shifted]),
            np.array([own[-1] for own in shifted]),
        )

    def scores(self, features: Array) -> tuple[Floats, Floats, Floats, Floats]:
        """Class logits (n, D), `ood` logits (n, G), distances and cosines (n, D) for features (G, n, d)."""
        x: Array = features - self.gaussians.centre
        logits: Array = x @ self.heads.transpose(0, 2, 1)
        return (
            self.gaussians.flat(logits[..., :-1]) + self.bias,
            logits[..., -1].T + self.ood_bias,
            *self.gaussians.scores(x),
        )
