"""A task's part of the two matrices of the frozen statistics, scatter and gram, as low-rank factors.

Both matrices are sums of outer products of rows, one per image and a few per class. A task of n images adds at most n
to their rank, so its part takes n rows instead of a whole matrix: with 100 images and 1712 + 1024 dimensions 1 MB
instead of 8 MB. The rows are eigenvectors, scaled by the roots of their eigenvalues: mixtures of all images of the
task, none of which is the feature of an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array, Floats

ROWS_AT_ONCE = 1024  # a larger product is faster; its sums are in float32
RELATIVE_ZERO = 1e-13  # a smaller eigenvalue, relative to the largest, is rounding


@dataclass(frozen=True)
class Factor:
    """The symmetric matrix rows' diag(signs) rows."""

    rows: Array  # (r, f)
    signs: NDArray[np.int8]  # (r,), -1 where images were removed that only the base of a migrated folder contains

    @classmethod
    def empty(cls, size: int) -> Factor:
        return cls(np.zeros((0, size), np.float32), np.zeros(0, np.int8))

    def changed(self, rows: Floats, sign: int) -> Factor:
        """Add (1) or remove (-1) the outer products of rows; the result has at most f rows."""
        stacked = np.concatenate([self.rows.astype(np.float64), rows])
        signs = np.concatenate([self.signs, np.full(len(rows), sign, np.int8)]).astype(np.float64)
        if len(stacked) <= stacked.shape[1]:
            span, corner = np.linalg.qr(stacked.T)  # (f, r), (r, r)
            core = (corner * signs) @ corner.T
        else:
            span, core = np.eye(stacked.shape[1]), (stacked.T * signs) @ stacked
        values, vectors = np.linalg.eigh((core + core.T) / 2)
        keep = np.abs(values) > np.abs(values).max(initial=0.0) * RELATIVE_ZERO
        mixed = (span @ vectors[:, keep]).T * np.sqrt(np.abs(values[keep]))[:, None]
        return Factor(np.ascontiguousarray(mixed, np.float32), np.sign(values[keep]).astype(np.int8))


def add_factors(factors: Iterable[Factor], matrix: Floats, sign: int = 1) -> None:
    """Add (1) or subtract (-1) the matrices of the factors in place. Rows of many factors are multiplied at once."""
    every = list(factors)
    for own in (1, -1):
        parts = [factor.rows[factor.signs == own] for factor in every]
        rows = np.concatenate([np.zeros((0, len(matrix)), np.float32), *parts])
        for start in range(0, len(rows), ROWS_AT_ONCE):
            chunk = rows[start : start + ROWS_AT_ONCE]
            matrix += (sign * own) * (chunk.T @ chunk)


@dataclass(frozen=True)
class TaskSums:
    """The scatter and the Gram matrix of the images of one task's classes."""

    scatter: Factor
    gram: Factor

    @classmethod
    def empty(cls, dimensions: int, expanded: int) -> TaskSums:
        return cls(Factor.empty(dimensions), Factor.empty(expanded))

    def changed(self, scatter_rows: Floats, expanded: Floats, sign: int) -> TaskSums:
        return TaskSums(self.scatter.changed(scatter_rows, sign), self.gram.changed(expanded, sign))

    def tensors(self) -> dict[str, NDArray[Any]]:
        scatter, gram = self.scatter, self.gram
        return {"scatter": scatter.rows, "scatter_signs": scatter.signs, "gram": gram.rows, "gram_signs": gram.signs}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> TaskSums:
        return cls(*(Factor(tensors[name], tensors[f"{name}_signs"]) for name in ("scatter", "gram")))


def add_sums(sums: Iterable[TaskSums], scatter: Floats, gram: Floats, sign: int = 1) -> None:
    """Add (1) or subtract (-1) the sums of tasks to both matrices in place."""
    every = list(sums)
    add_factors((own.scatter for own in every), scatter, sign)
    add_factors((own.gram for own in every), gram, sign)


def symmetric(triangle: Array, size: int) -> Floats:
    """The symmetric matrix of a lower triangle, row by row; ValueError if the sizes do not fit."""
    out = np.zeros((size, size))
    out[np.tril_indices(size)] = triangle
    out += np.tril(out, -1).T
    return out
