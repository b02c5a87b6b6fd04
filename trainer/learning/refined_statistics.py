"""The statistics of all classes under a refined feature, and scores of held-out images that are not in them.

Training draws the features of its own images together, while held-out images lie where fresh ones do: an image in the
statistics that was held out of the training is worth about two that were not. So held-out images are in the statistics
too, and are left out of them, fold by fold, for the scores that both decisions are fitted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array, RefinedScores
from models.inference.frozen import FrozenStatistics
from models.inference.model import Model
from models.inference.refined import RefinedFeature, Tensors, scaled
from trainer.learning.leave_out import LeaveOut
from trainer.learning.memory import Samples
from trainer.learning.reproducibility import blas_threads
from trainer.learning.settings import LearnerSettings
from trainer.learning.simulation import left_out_scores
from trainer.learning.tokens import TokenCache

THREADS = 2  # the same number everywhere: the last bits of sums depend on it


@dataclass(frozen=True)
class RefinedStatistics:
    """Sums over kept images under one refined feature."""

    feature: RefinedFeature
    statistics: FrozenStatistics
    columns: dict[str, int]  # image key -> its class; the images behind the sums

    @classmethod
    def of(
        cls,
        tokens: TokenCache,
        tail: Tensors,
        classes: Sequence[str],
        samples: Samples,
        settings: LearnerSettings,
    ) -> RefinedStatistics | None:
        """Of the kept images of these classes; None if a class has none left that adapters are trained on."""
        if not all(samples.memory.get(name) for name in classes):
            return None
        columns = _chosen(classes, samples, settings.recipe.refined_images)
        with blas_threads(THREADS):
            rows, labels = scaled(tokens.refined(list(columns), tail)), np.array(list(columns.values()), np.int64)
            empty = FrozenStatistics.empty(rows.shape[1], 1)
            statistics = empty.with_images(rows, _nothing(rows), labels, len(classes))
            return cls(RefinedFeature.of(tail, statistics), statistics, columns)

    def left_out_scores(
        self, features: Array, keys: Sequence[str], likeness: NDArray[np.int64], rng: np.random.Generator
    ) -> RefinedScores:
        """The scores of images with these outputs of the tail (n, r), without the images of their fold: (n, C).

        Images of one likeness group (n,) are in one fold.
        """
        out = self.feature.scores(features)
        inside = np.array([key in self.columns for key in keys], bool)
        if inside.any():
            rows = scaled(features[inside])
            own = np.array([self.columns[key] for key in keys if key in self.columns], np.int64)
            with blas_threads(THREADS):
                left_out = left_out_scores(LeaveOut(self.statistics, rows, _nothing(rows), own), rng, likeness[inside])
            out.cosines[inside], out.distances[inside] = left_out.cosines, left_out.distances
        return out


def left_out_refined(
    tokens: TokenCache,
    model: Model,
    samples: Samples,
    keys: Sequence[str],
    likeness: NDArray[np.int64],
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> RefinedScores:
    """The scores of images that were held out, under the refined feature of a model that keeps these samples."""
    if model.refined is None:
        raise ValueError("the model has no refined feature")
    features = tokens.refined(keys, model.refined.tail)
    statistics = RefinedStatistics.of(tokens, model.refined.tail, model.classes, samples, settings)
    if statistics is None:  # the images of a class were deleted since
        return model.refined.scores(features)
    return statistics.left_out_scores(features, keys, likeness, rng)


def _chosen(classes: Sequence[str], samples: Samples, most: int) -> dict[str, int]:
    """Kept images and their classes: at most `most`, as many of each class, held-out ones first.

    At least one of each class is not held out, so any held-out image can be left out.
    """
    keys: dict[str, list[str]] = {name: [] for name in classes}
    for sample in sorted(samples.held_out, key=lambda sample: sample.key):
        keys.setdefault(sample.label, []).append(sample.key)
    share = max(2, most // max(len(classes), 1))
    every = ((c, [*keys[name][: share - 1], *sorted(samples.memory[name])]) for c, name in enumerate(classes))
    return {key: c for c, own in every for key in own[:share]}


def _nothing(rows: Array) -> Array:
    """In place of random features: there is no ridge regression on the refined feature."""
    return np.zeros((len(rows), 1), np.float32)
