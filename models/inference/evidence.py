"""Evidence about images: everything that the two decisions, which class and whether novel, may weigh.

Shapes, here and where it is used: n images, T tasks, c_k classes in task k, C classes in total, d dimensions of a
task's feature, f of the frozen feature, M of its random expansion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Floats = NDArray[np.float64]
SMALLEST_DISTANCE = 1e-9  # an image may lie exactly on a class mean
SPAN_RIDGE = 1e-4  # of the mean squared length of the class means: two classes may have nearly the same mean


@dataclass(frozen=True)
class Features:
    """The features of n images under each task's network and under the frozen backbone."""

    tasks: Sequence[Array] | Array  # T times (n, d), or stacked: (T, n, d)
    frozen: Array  # (n, f)
    expanded: Array  # (n, M), random ReLU features of the frozen feature
    ran: NDArray[np.bool_] | None = None  # (n, T), the networks that ran (cascade.py); None: all
    turned: Array | None = None  # (3, T, n, d), of the turned images (rotations.py); None: the rule uses no rotations
    refined: Array | None = None  # (n, r), outputs of the version's tail (refined.py); None: no decision weighs them


@dataclass(frozen=True)
class FrozenScores:
    """Closed-form scores of the frozen feature for every class: (n, C) each."""

    distances: Floats  # Mahalanobis, under one covariance of all classes
    cosines: Floats  # between the whitened image and the whitened class mean
    ridge: Floats  # ridge regression of the class indicator on the expanded feature
    span_distances: Floats  # the part of each distance that lies in the span of the class means, where classes differ
    output_distances: Floats  # Mahalanobis, of the backbone's output alone: the first part of the frozen feature
    output_cosines: Floats  # whitened cosine of the same

    def term(self, name: str) -> Floats:
        """One kind of evidence by its name in a rule, larger for a better fit."""
        if name == "frozen_distance":
            return -self.distances
        terms = {"frozen_cosine": self.cosines, "output_cosine": self.output_cosines, "ridge": self.ridge}
        return terms[name]

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Which images have scores (n,): the row of one that could not be left out is NaN."""
        return np.asarray(~np.isnan(self.ridge).any(axis=1))

    def rows(self, rows: NDArray[np.bool_]) -> FrozenScores:
        """The scores of some images."""
        return FrozenScores(*(getattr(self, field.name)[rows] for field in fields(self)))

    def first_classes(self, count: int) -> FrozenScores:
        return FrozenScores(*(getattr(self, field.name)[:, :count] for field in fields(self)))


@dataclass(frozen=True)
class RefinedScores:
    """Closed-form scores of the refined feature (refined.py) for every class: (n, C) each."""

    cosines: Floats  # between the whitened image and the whitened class mean
    distances: Floats  # Mahalanobis, under one covariance of all classes

    def rows(self, rows: NDArray[np.bool_]) -> RefinedScores:
        """The scores of some images."""
        return RefinedScores(self.cosines[rows], self.distances[rows])


@dataclass(frozen=True)
class Evidence:
    """The inputs of a rule, for n images. The classes of all tasks stand side by side, as in the rule's scores."""

    counts: tuple[int, ...]  # (T,): classes per task
    class_logits: Floats  # (n, C)
    ood_logits: Floats  # (n, T), -inf for a head without `ood`
    class_distances: Floats  # (n, C), Mahalanobis in the feature space of the class's task
    class_cosines: Floats  # (n, C), whitened cosine there
    frozen: FrozenScores
    ran: NDArray[np.bool_] | None = None  # (n, T), the networks that ran (cascade.py); None: all
    has_ood: bool = True  # whether the heads have an `ood` output; those of methods without replay have none
    refined: RefinedScores | None = None  # None: the version has no refined feature, or its decisions do not weigh it

    @classmethod
    def of_tasks(
        cls, logits: Sequence[Floats], distances: Sequence[Floats], cosines: Sequence[Floats], frozen: FrozenScores
    ) -> Evidence:
        """From arrays per task: logits (n, c_k + 1) with `ood` last, distances and cosines (n, c_k)."""
        nothing = np.zeros((len(frozen.distances), 0))
        return cls(
            tuple(x.shape[1] - 1 for x in logits),
            np.concatenate([nothing, *(x[:, :-1] for x in logits)], axis=1),
            np.concatenate([nothing, *(x[:, -1:] for x in logits)], axis=1),
            np.concatenate([nothing, *distances], axis=1),
            np.concatenate([nothing, *cosines], axis=1),
            frozen,
        )

    def rows(self, rows: NDArray[np.bool_]) -> Evidence:
        """The evidence about some images."""
        return Evidence(
            self.counts,
            self.class_logits[rows],
            self.ood_logits[rows],
            self.class_distances[rows],
            self.class_cosines[rows],
            self.frozen.rows(rows),
            None if self.ran is None else self.ran[rows],
            self.has_ood,
            None if self.refined is None else self.refined.rows(rows),
        )

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first class of each task: (T,)."""
        return np.cumsum((0, *self.counts[:-1])) if self.counts else np.zeros(0, np.int64)

    def per_class(self, values: Floats) -> Floats:
        """Repeat a value per task for all of its classes: (n, T) -> (n, C), or (T,) -> (C,)."""
        return np.repeat(values, self.counts, axis=-1)

    @property
    def logits(self) -> list[Floats]:
        """Per task: (n, c_k + 1), `ood` last."""
        own = self._split(self.class_logits)
        return [np.column_stack([x, self.ood_logits[:, k]]) for k, x in enumerate(own)]

    @property
    def distances(self) -> list[Floats]:
        """Per task: (n, c_k)."""
        return self._split(self.class_distances)

    @property
    def cosines(self) -> list[Floats]:
        """Per task: (n, c_k)."""
        return self._split(self.class_cosines)

    def _split(self, values: Floats) -> list[Floats]:
        return np.split(values, self.starts[1:], axis=1) if self.counts else []


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return out


def log_probabilities(evidence: Evidence, scales: tuple[float, ...] = ()) -> Floats:
    """log p(Y_k | x, k) of all tasks: `ood` counts in the denominator and is then dropped. (n, C)"""
    factors = np.array(scales) if scales else np.ones(len(evidence.counts))
    logits, ood = evidence.class_logits * evidence.per_class(factors), evidence.ood_logits * factors
    top = np.maximum(np.maximum.reduceat(logits, evidence.starts, axis=1), ood)
    shifted = logits - evidence.per_class(top)
    total = np.add.reduceat(np.exp(shifted), evidence.starts, axis=1) + np.exp(ood - top)
    return shifted - evidence.per_class(np.log(total))


def log_coefficients(evidence: Evidence) -> Floats:
    """log s_k(x), Eq. ensemble: the largest inverse Mahalanobis distance to a class of each task. (n, T)"""
    return -log_distance(np.minimum.reduceat(evidence.class_distances, evidence.starts, axis=1))


def log_distance(distances: Floats) -> Floats:
    out: Floats = np.log(np.maximum(distances, SMALLEST_DISTANCE))
    return out


def cosine(products: Floats, left: Floats, right: Floats) -> Floats:
    """Cosines from inner products (n, C) and squared lengths (n, 1) and (C,); 0 for a vector without length."""
    lengths = np.sqrt(np.maximum(left * right, 0.0))
    out: Floats = np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1.0), 0.0)
    return out


def distance(products: Floats, left: Floats, right: Floats) -> Floats:
    """Distances (n, C) from inner products and squared lengths as for `cosine`."""
    out: Floats = np.sqrt(np.maximum(left + right - 2 * products, 0.0))
    return out


def span_basis(products: Floats) -> Floats:
    """(C, C), from the inner products of C vectors: it maps inner products with them to coordinates in their span."""
    values, vectors = np.linalg.eigh(products)
    out: Floats = vectors / np.sqrt(np.maximum(values, 0.0) + _span_ridge(products))  # rounding gives negative values
    return out


def lengths_in_span(inner: Floats, products: Floats) -> Floats:
    """(n, 1), squared lengths in the span of C vectors of n others with these inner products (n, C).

    As with `span_basis`, which costs more and is worth it if it serves many calls.
    """
    regular = products + _span_ridge(products) * np.eye(len(products))
    out: Floats = np.einsum("nc,cn->n", inner, np.linalg.solve(regular, inner.T))[:, None]
    return out


def _span_ridge(products: Floats) -> float:
    return max(SPAN_RIDGE * float(np.trace(products)) / len(products), 1e-12)


def span_distance(products: Floats, basis: Floats, left: Floats, right: Floats) -> Floats:
    """Distances (n, C) in the span of the class means, from inner products and squared lengths as for `cosine`."""
    return distance_in_span(((products @ basis) ** 2).sum(axis=1, keepdims=True), products, left, right)


def distance_in_span(inside: Floats, products: Floats, left: Floats, right: Floats) -> Floats:
    """The same from the squared lengths in the span: (n, 1)."""
    return distance(products, np.minimum(inside, left), right)
