"""What answers: a loaded version, or nothing yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from models.images import ImageLimits, read_image
from models.inference.answer import NOTHING_KNOWN
from models.inference.evidence import Array
from models.inference.predictor import Scored


class ServableModel(Protocol):
    """All that the engine and the routes need of a version. Both methods may be called from any thread."""

    @property
    def version(self) -> int: ...

    @property
    def reference_points(self) -> int:
        """Held-out scores that the calibrated score is a quantile of."""

    def decode(self, data: bytes) -> Array:
        """Bytes to what `score` takes; an ImageError when they are not a picture."""

    def score(self, pixels: Sequence[Array], all_threads: bool = True) -> list[Scored]:
        """An answer a picture, in order; `alone` when no other lane computes."""


class EmptyModel:
    """Before the first task: everything is novel, but a broken picture is still a broken picture."""

    version = 0
    reference_points = 0

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits

    def decode(self, data: bytes) -> Array:
        read_image(data, self._limits, hint=1)
        return np.zeros((0,), np.float32)

    def score(self, pixels: Sequence[Array], all_threads: bool = True) -> list[Scored]:
        return [Scored(NOTHING_KNOWN, None) for _ in pixels]
