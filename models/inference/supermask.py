"""Supermasks: the adapters of a task are fixed weights, the same for every task, under a mask of its own (SupSup).

The fixed weights are signed constants, with the deviation of Kaiming's start for the share of weights that a mask
keeps. Their signs follow from a hash, so they are stored nowhere. A task stores one bit per weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array
from models.inference.shared_adapters import Adapters

Bits = NDArray[np.uint8]


@lru_cache(maxsize=4)
def fixed_weights(adapters: int, units: int, dimensions: int, kept: float, scale: float) -> tuple[Array, Array]:
    """W1 (A, B, d) and W2 (A, d, B): +-1 times sqrt(2 / (kept fan_in)), W2 also times `scale`. Read-only."""
    w1 = _signs("w1", (adapters, units, dimensions)) * np.float32(np.sqrt(2 / (kept * dimensions)))
    w2 = _signs("w2", (adapters, dimensions, units)) * np.float32(scale * np.sqrt(2 / (kept * units)))
    for weights in (w1, w2):
        weights.flags.writeable = False
    return w1, w2


def _signs(name: str, shape: tuple[int, ...]) -> Array:
    """A hash and not a random generator: its bits are the same in every release of every library."""
    size = int(np.prod(shape))
    bits = hashlib.shake_128(f"openworld supermask {name} {shape}".encode()).digest(-(-size // 8))
    signs = np.unpackbits(np.frombuffer(bits, np.uint8), count=size).astype(np.float32)
    return (2 * signs - 1).reshape(shape)


@dataclass(frozen=True)
class Supermask:
    """The mask of one task over the fixed weights, packed."""

    mask1: Bits  # of W1, ceil(A B d / 8)
    mask2: Bits  # of W2
    shape: NDArray[np.int64]  # A, B, d
    constants: NDArray[np.float64]  # the share of weights that the mask keeps, and the scale of W2

    @classmethod
    def pack(cls, mask1: NDArray[np.bool_], mask2: NDArray[np.bool_], kept: float, scale: float) -> Supermask:
        """Masks (A, B, d) and (A, d, B)."""
        shape, constants = np.array(mask1.shape, np.int64), np.array([kept, scale])
        return cls(np.packbits(mask1), np.packbits(mask2), shape, constants)

    def adapters(self) -> Adapters:
        """The fixed weights under the mask; no biases."""
        a, b, d = (int(size) for size in self.shape)
        kept, scale = (float(constant) for constant in self.constants)
        w1, w2 = fixed_weights(a, b, d, kept, scale)
        masks = (np.unpackbits(bits, count=a * b * d) for bits in (self.mask1, self.mask2))
        w1, w2 = (weights * mask.reshape(weights.shape) for weights, mask in zip((w1, w2), masks, strict=True))
        return Adapters(w1, np.zeros((a, b), np.float32), w2, np.zeros((a, d), np.float32))

    def tensors(self) -> dict[str, NDArray[Any]]:
        return {f"supermask.{name}": getattr(self, name) for name in ("mask1", "mask2", "shape", "constants")}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, NDArray[Any]]) -> Supermask | None:
        """None for a task without one."""
        if "supermask.shape" not in tensors:
            return None
        return cls(*(tensors[f"supermask.{name}"] for name in ("mask1", "mask2", "shape", "constants")))
