"""The refined feature: a CNN's feature whose last stages are adapted to all kept images, and closed-form scores on it.

The frozen feature knows what the backbone was trained on. The refined one is trained on what the folder has learned:
the tail of the network (models/network/tail.py) has adapters that every version learns anew, on the kept images of all
classes. Classes are then compared in closed form, as on the frozen feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from models.inference.evidence import Array, Floats, RefinedScores, cosine, distance
from models.inference.frozen import FrozenStatistics
from models.versions.manifest import FileEntry

TAIL = "tail."  # the prefix of the adapters among the tensors of a stored feature
Tensors = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class RefinedFeature:
    """The adapters of the tail, and the statistics of all classes under them."""

    tail: Tensors  # by name, as the inputs of the graph `tail`
    means: Array  # (C, r)
    whitening: Array  # (r, r), rows @ whitening.T have the identity as covariance
    entry: FileEntry | None = None  # the content that it was read from

    @classmethod
    def of(cls, tail: Tensors, statistics: FrozenStatistics) -> RefinedFeature:
        """From the statistics of scaled outputs of the tail, for images of every class."""
        return cls(tail, statistics.means.astype(np.float32), statistics.whitening)

    def scores(self, features: Array) -> RefinedScores:
        """Score outputs of the tail (n, r) against every class."""
        centre, means, squares = self._solved
        x = (scaled(features) - centre) @ self.whitening.T
        lengths = (x * x).sum(axis=1, keepdims=True, dtype=np.float64)
        products = (x @ means.T).astype(np.float64)
        return RefinedScores(cosine(products, lengths, squares), distance(products, lengths, squares))

    @cached_property
    def _solved(self) -> tuple[Array, Array, Floats]:
        """The mean of the class means (r,), the whitened class means (C, r) and their squared lengths (C,)."""
        centre = self.means.mean(axis=0)
        means: Array = (self.means - centre) @ self.whitening.T
        return centre, means, (means.astype(np.float64) ** 2).sum(axis=1)

    def tensors(self) -> dict[str, Array]:
        """By name, for storage."""
        out = {f"{TAIL}{name}": tensor for name, tensor in self.tail.items()}
        return out | {"means": self.means, "whitening": self.whitening}

    @classmethod
    def from_tensors(cls, tensors: Tensors, entry: FileEntry) -> RefinedFeature:
        tail = {name.removeprefix(TAIL): tensor for name, tensor in tensors.items() if name.startswith(TAIL)}
        return cls(tail, tensors["means"], tensors["whitening"], entry)


def scaled(features: Array) -> Array:
    """To length 1, as the parts of the frozen feature."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    out: Array = (features / np.maximum(lengths, 1e-12)).astype(np.float32)
    return out
