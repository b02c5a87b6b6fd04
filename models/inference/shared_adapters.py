"""Adapters, and the adapters that all tasks are trained in, one task after another.

A task may change only entries that no earlier task uses (models/network/hat.py: `protection`). What its training leaves
is therefore stored as an `AdapterUpdate`: the values of these entries. Its size depends on the free units, not on the
number of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array

PARTS = ("w1", "b1", "w2", "b2")
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Adapters:
    """A adapters of B bottleneck units over d dimensions (see models/network/adapted_blocks.py)."""

    w1: Array  # (A, B, d)
    b1: Array  # (A, B)
    w2: Array  # (A, d, B)
    b2: Array  # (A, d)


@dataclass(frozen=True)
class SharedAdapters:
    """The adapters that every task is trained in, and the units that the tasks so far use."""

    adapters: Adapters
    used1: Array  # (A, B), cumulative mask of the bottleneck units, 0 or 1
    used2: Array  # (A, d), cumulative mask of the outputs

    @classmethod
    def empty(cls, adapters: int = 0, dimensions: int = 0) -> SharedAdapters:
        """Without bottleneck units: the start of the first update, and what a model that only answers has."""
        a, d = adapters, dimensions
        shapes = ((a, 0, d), (a, 0), (a, d, 0), (a, d), (a, 0), (a, d))
        w1, b1, w2, b2, used1, used2 = (np.zeros(shape, np.float32) for shape in shapes)
        return cls(Adapters(w1, b1, w2, b2), used1, used2)

    @property
    def bottleneck(self) -> int:
        return int(self.adapters.w1.shape[1])

    @property
    def used_ratio(self) -> float:
        """The share of used bottleneck units in the fullest adapter; at 1.0 a layer has no free unit."""
        return float(self.used1.mean(axis=1).max()) if self.used1.size else 0.0

    @property
    def capacity(self) -> dict[str, float]:
        """Used units, for reports."""
        used = float(self.used1.mean()) if self.used1.size else 0.0
        return {"bottleneck": self.bottleneck, "used_mean": used, "used_max": self.used_ratio}

    def tensors(self) -> dict[str, Array]:
        return {**{name: getattr(self.adapters, name) for name in PARTS}, "used1": self.used1, "used2": self.used2}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> SharedAdapters:
        return cls(Adapters(*(tensors[name] for name in PARTS)), tensors["used1"], tensors["used2"])


@dataclass(frozen=True)
class AdapterUpdate:
    """What the training of one task left in the shared adapters."""

    values: dict[str, Array]  # of the free entries before the task, flat, by the name of their tensor
    used1: NDArray[np.uint8]  # (A, B) after the task
    used2: NDArray[np.uint8]  # (A, d)

    @classmethod
    def between(cls, before: SharedAdapters, after: SharedAdapters) -> AdapterUpdate:
        """ValueError if an entry changed that an earlier task uses."""
        free = _free(before, after.bottleneck)
        values = {name: getattr(after.adapters, name)[free[name]] for name in PARTS}
        update = cls(values, after.used1.astype(np.uint8), after.used2.astype(np.uint8))
        again = update.applied(before).adapters
        pairs = [(getattr(again, name), getattr(after.adapters, name)) for name in PARTS]
        # With NaN a comparison takes ten times as long, and there is none but after a training that diverged.
        if not all(np.array_equal(*pair) or np.array_equal(*pair, equal_nan=True) for pair in pairs):
            raise ValueError("the training changed entries of the adapters that an earlier task uses")
        return update

    def applied(self, before: SharedAdapters) -> SharedAdapters:
        """The shared adapters after the task."""
        (a, b), d = self.used1.shape, self.used2.shape[1]
        free, parts = _free(before, b), {}
        for name, shape in zip(PARTS, ((a, b, d), (a, b), (a, d, b), (a, d)), strict=True):
            old = getattr(before.adapters, name)
            out = np.zeros(shape, np.float32)
            out[tuple(slice(size) for size in old.shape)] = old
            out[free[name]] = self.values[name]
            parts[name] = out
        return SharedAdapters(Adapters(**parts), self.used1.astype(np.float32), self.used2.astype(np.float32))

    def tensors(self) -> dict[str, NDArray[Any]]:
        return {**self.values, "used1": self.used1, "used2": self.used2}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> AdapterUpdate:
        return cls({name: tensors[name] for name in PARTS}, tensors["used1"], tensors["used2"])


def _free(before: SharedAdapters, bottleneck: int) -> dict[str, Mask]:
    """The entries that a task may change, in adapters with this number of units: not those of earlier tasks."""
    new = np.zeros((len(before.used1), bottleneck - before.bottleneck))
    unit = ~np.concatenate([before.used1, new], axis=1).astype(bool)  # (A, B)
    output = ~before.used2.astype(bool)  # (A, d)
    d = output.shape[1]
    return {
        "w1": np.broadcast_to(unit[:, :, None], (*unit.shape, d)),
        "b1": unit,
        "w2": output[:, :, None] | unit[:, None, :],
        "b2": output,
    }
