"""Rotations of CSI: a task is learned on images turned by 0, 90, 180 and 270 degrees, each turn with its own classes.

A head of such a method has four outputs per class. The logit of a class is the mean of the four, each of the image that
is turned accordingly (Eq. ensemblelogit):

    f(x)_j = 1/4 sum over deg of f(x turned by deg)_{j, deg}

All four go through the trunk, so an answer costs four trunk passes instead of one. `rotations = 1` takes the output of
the upright image alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.inference.evidence import Array, Floats

TURNS = 3  # of an image, beside the upright one
ROTATIONS = TURNS + 1


def turn(pixels: Array, quarters: int) -> Array:
    """Square images (..., H, H) turned counter-clockwise by quarters of a circle."""
    return np.ascontiguousarray(np.rot90(pixels, quarters, axes=(-2, -1)))


def with_turned(pixels: Array) -> Array:
    """The images (n, 3, H, H), then all of them turned once, twice and three times: (4 n, 3, H, H)."""
    return np.concatenate([pixels, *(turn(pixels, quarters) for quarters in range(1, ROTATIONS))])


class TurnedHeads:
    """The outputs of all tasks for turned images."""

    def __init__(self, heads: Sequence[tuple[Array | None, Array | None]]) -> None:
        """Per task, weight (3, c_k, d) and bias (3, c_k)."""
        self._heads = [(weight, bias) for weight, bias in heads if weight is not None and bias is not None]
        if len(self._heads) < len(heads):
            raise ValueError("the rule uses rotations, and a task has no outputs for them")

    def ensemble(self, upright: Floats, turned: Array) -> Floats:
        """Eq. ensemblelogit for all classes: (n, C), from the upright logits (n, C) and features (3, T, n, d)."""
        total = np.zeros_like(upright)
        for quarter, of_tasks in enumerate(turned):
            pairs = zip(of_tasks, self._heads, strict=True)
            logits = [z @ weight[quarter].T + bias[quarter] for z, (weight, bias) in pairs]
            total += np.concatenate(logits, axis=1)
        out: Floats = (upright + total) / ROTATIONS
        return out
