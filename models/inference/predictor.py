"""One version of a data folder, ready to answer: image bytes to answers, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.errors import ImageError
from models.images import DEFAULT_LIMITS, ImageLimits, Preprocessing, load_pixels
from models.inference.answer import Answer, answer
from models.inference.evidence import Array
from models.inference.model import Model
from models.inference.model_cache import LoadedModel, ModelCache
from models.inference.providers import Device
from models.inference.runtime import CHUNK, Runtime, RuntimeCache
from models.storage import DataFolder
from models.versions.store import VersionStore


class Scored(NamedTuple):
    """An answer, and the frozen backbone's feature for measuring similarity (None without a backbone)."""

    answer: Answer
    embedding: Array | None


@dataclass(frozen=True)
class Predictor:
    """A loaded and verified version. Thread-safe."""

    version: int
    model: Model
    preprocessing: Preprocessing
    runtime: Runtime
    limits: ImageLimits = DEFAULT_LIMITS

    @classmethod
    def open(
        cls, folder: DataFolder, version: int | None = None, device: Device = "auto", threads: int | None = None
    ) -> Predictor:
        """Load a version, by default the current one; raises NothingLearned or CorruptVersion."""
        store = VersionStore(folder)
        return cls.from_version(ModelCache(store).load(version), RuntimeCache(store, device, threads))

    @classmethod
    def from_version(
        cls, loaded: LoadedModel, runtimes: RuntimeCache, limits: ImageLimits = DEFAULT_LIMITS
    ) -> Predictor:
        """A version on the runtime that it shares with all versions of its backbone."""
        runtime = runtimes.get(loaded.manifest)
        return cls(loaded.manifest.version, loaded.model, loaded.preprocessing, runtime, limits)

    @property
    def reference_points(self) -> int:
        """The number of left-out images behind the calibrated score, at most that of the stored quantiles."""
        return len(self.model.novelty.known)

    def decode(self, data: bytes, small_only: bool = False) -> Array:
        """The pixels of an image: (3, H, W). With `small_only`, LargeImage if it takes long to decode."""
        return load_pixels(data, self.preprocessing, self.limits, small_only=small_only)

    def score(self, pixels: Sequence[Array], all_threads: bool = True) -> list[Scored]:
        """One answer per image, in order; pass `all_threads=False` while other batches are computed."""
        features = self.runtime.features(self.model, np.stack(pixels), all_threads)
        answers = answer(self.model, self.model.evidence(features))
        return [Scored(*pair) for pair in zip(answers, features.frozen, strict=True)]

    def predict(self, images: Sequence[bytes]) -> list[Answer | ImageError]:
        """One answer per image, in order; for an image that cannot be read, its error."""
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
        scored = iter(self.score(pixels) if pixels else [])
        return [errors[place] if place in errors else next(scored).answer for place in range(len(images))]
