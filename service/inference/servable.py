"""The models that a server answers with: a loaded version, or the empty model before the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from models.images import ImageLimits, open_image
from models.inference.answer import NOTHING_KNOWN
from models.inference.evidence import Array
from models.inference.predictor import Scored


class ServableModel(Protocol):
    """What the engine and the routes need of a version; `Predictor` implements it. Methods are thread-safe."""

    @property
    def version(self) -> int: ...

    @property
    def reference_points(self) -> int:
        """The number of held-out scores behind the calibrated score."""

    def decode(self, data: bytes, small_only: bool = False) -> Array:
        """The input of `score` for an encoded image; raises ImageError, LargeImage only with `small_only`."""

    def score(self, pixels: Sequence[Array], all_threads: bool = True) -> list[Scored]:
        """One answer per image, in order; pass `all_threads=False` while other batches are computed."""


class EmptyModel:
    """Version 0, before anything is learned: every readable image is novel."""

    version = 0
    reference_points = 0

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits

    def decode(self, data: bytes, small_only: bool = False) -> Array:
        with open_image(data, self._limits, hint=1, small_only=small_only):
            return np.zeros((0,), np.float32)

    def score(self, pixels: Sequence[Array], all_threads: bool = True) -> list[Scored]:
        return [Scored(NOTHING_KNOWN, None) for _ in pixels]
