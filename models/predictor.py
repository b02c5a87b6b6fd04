"""A version of a data folder, ready to answer: from image bytes to answers, with no torch in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.answer import Answer, answer
from models.errors import CorruptVersion, ImageError
from models.evidence import gather
from models.images import DEFAULT_LIMITS, ImageLimits, Preprocessing, load_pixels
from models.loading import read_model
from models.model import Model
from models.runtime import CHUNK, Device, Runtime
from models.store import VersionStore


@dataclass(frozen=True)
class Predictor:
    """One version, loaded and checked."""

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
        loaded = store.load(version)
        number, graphs = loaded.manifest.version, loaded.manifest.graphs
        missing = [role for role in ("trunk", "blocks") if role not in graphs]
        if missing:
            raise CorruptVersion(f"version {number}: its manifest names no graph for {' and '.join(missing)}")
        model, preprocessing = read_model(loaded)
        runtime = Runtime(store.graph_path(graphs["trunk"]), store.graph_path(graphs["blocks"]), device, threads)
        return cls(number, model, preprocessing, runtime)

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
                pixels.append(load_pixels(data, self.preprocessing, self.limits))
            except ImageError as error:
                errors[place] = error
        answers: list[Answer] = []
        if pixels:
            features = self.runtime.features_of(self.model, np.stack(pixels))
            answers = answer(self.model, gather(self.model, features))
        read = iter(answers)
        return [errors[place] if place in errors else next(read) for place in range(len(images))]
