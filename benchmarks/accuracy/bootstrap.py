"""Paired bootstrap of two methods over class orders and test images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
REPLICATES = 1000
LEVEL = 0.9


@dataclass(frozen=True)
class Outcomes:
    """What one method did with each of n test images of one stream of T tasks."""

    correct: NDArray[np.bool_]  # (n,), after the last task
    novelty: NDArray[np.float32]  # (T, n), higher for known images
    known: NDArray[np.bool_]  # (T, n)

    def last_accuracy(self, weight: Floats) -> float:
        """`weight` is how often each test image was drawn."""
        learned = weight * self.known[-1]
        return float((learned * self.correct).sum() / max(learned.sum(), 1e-12))

    def ai_auc(self, weight: Floats) -> float:
        values = []
        for place, known in zip(self._places, self.known, strict=True):
            positive = np.bincount(place, weight * known)
            negative = np.bincount(place, weight * ~known)
            total = positive.sum() * negative.sum()
            if total:
                values.append(float((positive * (np.cumsum(negative) - negative / 2)).sum() / total))
        return float(np.mean(values)) if values else float("nan")

    @cached_property
    def _places(self) -> list[NDArray[np.int64]]:
        """The place of each image's score among the different scores of a step."""
        return [np.unique(row, return_inverse=True)[1].astype(np.int64) for row in self.novelty]


def interval(
    ours: Sequence[Outcomes], other: Sequence[Outcomes], figure: str, replicates: int = REPLICATES
) -> tuple[float, float, float]:
    """(difference, lower and upper end of its 90 % interval) of `last` or `ai_auc`, one entry per class order."""
    rng = np.random.default_rng(0)

    def value(outcomes: Outcomes, weight: Floats) -> float:
        return outcomes.last_accuracy(weight) if figure == "last" else outcomes.ai_auc(weight)

    def difference(order: int, weight: Floats) -> float:
        return value(ours[order], weight) - value(other[order], weight)

    point = np.mean([difference(order, np.ones(len(ours[order].correct))) for order in range(len(ours))])
    drawn = []
    for _ in range(replicates):
        orders = rng.integers(0, len(ours), len(ours))
        drawn.append(np.mean([difference(order, _weight(ours[order], rng)) for order in orders]))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(point), float(low), float(high)


def half_width(outcomes: Outcomes, figure: str, replicates: int = 400) -> float:
    """Half of the 90 % interval of a method's figure over the test images of one stream."""
    rng = np.random.default_rng(0)
    weights = [_weight(outcomes, rng) for _ in range(replicates)]
    drawn = [outcomes.last_accuracy(w) if figure == "last" else outcomes.ai_auc(w) for w in weights]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(high - low) / 2


def _weight(outcomes: Outcomes, rng: np.random.Generator) -> Floats:
    """Draw images with replacement, learned classes and others separately."""
    weight = np.zeros(len(outcomes.correct))
    for part in (outcomes.known[-1], ~outcomes.known[-1]):
        own = np.flatnonzero(part)
        if len(own):
            weight[own] = np.bincount(rng.integers(0, len(own), len(own)), minlength=len(own))
    return weight
