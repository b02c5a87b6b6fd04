"""Randomness with a name: every draw depends on the seed and on what it is for, never on what was drawn before.

That is what lets a training that was killed go on from its last epoch and end with the same weights.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """A generator of its own for each purpose."""
    name = "/".join(str(part) for part in (seed, *purpose))
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def truncated_normal(rng: np.random.Generator, shape: tuple[int, ...], std: float = 0.02) -> NDArray[np.float32]:
    """Normal draws within two standard deviations, the usual start of a transformer's weights."""
    draws = rng.standard_normal(shape)
    while (outside := np.abs(draws) > 2).any():
        draws[outside] = rng.standard_normal(int(outside.sum()))
    return (draws * std).astype(np.float32)
