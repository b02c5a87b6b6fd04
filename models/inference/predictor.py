"""A version of a data folder, ready to answer: from image bytes to answers, with no torch in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.errors import ImageError
from models.images import DEFAULT_LIMITS, ImageLimits, Preprocessing, load_pixels
from models.inference.answer import Answer, answer
from models.inference.evidence import gather
from models.inference.loading import read_model
from models.inference.model import Model
from models.inference.runtime import CHUNK, Device, Runtime
from models.inference.runtime_cache import Runtimes
from models.versions.store import LoadedVersion, VersionStore

Array = NDArray[np.float32]


class Scored(NamedTuple):
    """An answer, and the frozen backbone's feature that likeness is measured by (None where there is no backbone)."""

    answer: Answer
    embedding: Array | None


@dataclass(frozen=True)
class Predictor:
    """One version, loaded and checked. Its methods may be called from several threads."""

    version: int
    model: Model
    preprocessing: Preprocessing
    runtime: Runtime
    limits: ImageLimits = DEFAULT_LIMITS

    @classmethod
    def open(
        cls, root: Path, version: int | None = None, device: Device = "auto", threads: int | None = None
    ) -> Predictor:
        """The version, or the current one; NothingLearned when there is none, CorruptVersion when it is not whole."""
        store = VersionStore(root)
        return cls.of(store.load(version), Runtimes(store, device, threads))

    @classmethod
    def of(cls, loaded: LoadedVersion, runtimes: Runtimes, limits: ImageLimits = DEFAULT_LIMITS) -> Predictor:
        """A version on the runtime that it shares with all others of its backbone."""
        model, preprocessing = read_model(loaded)
        return cls(loaded.manifest.version, model, preprocessing, runtimes.of(loaded.manifest), limits)

    @property
    def reference_points(self) -> int:
        """Held-out scores that the calibrated score is a quantile of."""
        return len(self.model.calibration.reference)

    def decode(self, data: bytes) -> Array:
        """The pixels of one image: (3, H, W)."""
        return load_pixels(data, self.preprocessing, self.limits)

    def score(self, pixels: Sequence[Array], alone: bool = True) -> list[Scored]:
        """Every task of the version on every image, in one go; `alone` when nothing else is computed meanwhile."""
        features = self.runtime.features_of(self.model, np.stack(pixels), alone)
        answers = answer(self.model, gather(self.model, features))
        return [Scored(*pair) for pair in zip(answers, features.frozen, strict=True)]

    def predict(self, images: Sequence[bytes]) -> list[Answer | ImageError]:
        """An answer an image, in order; an image that cannot be read fails alone, with its error in its place."""
        out: list[Answer | ImageError] = []
        for start in range(0, len(images), CHUNK):
            out += self._predict(images[start : start + CHUNK])
        return out

    def _predict(self, images: Sequence[bytes]) -> list[Answer | ImageError]:
        pixels, errors = [], {}
        for place, data in enumerate(images):
            try:
                pixels.append(self.decode(data))
            except ImageError as error:
                errors[place] = error
        read = iter(self.score(pixels) if pixels else [])
        return [errors[place] if place in errors else next(read).answer for place in range(len(images))]
