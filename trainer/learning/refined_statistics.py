"""The statistics of all classes under a refined feature, and scores of held-out images that are not in them.

Training draws the features of its own images together, while held-out images lie where fresh ones do: an image in the
statistics that was held out of the training is worth about two that were not. So held-out images are in the statistics
too, and are left out of them, fold by fold, for the scores that both decisions are fitted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.inference.evidence import Array, RefinedScores
from models.inference.frozen import FrozenStatistics
from models.inference.model import Model
from models.inference.refined import RefinedFeature, Tensors, scaled
from trainer.learning.leave_out import LeaveOut
from trainer.learning.likeness import groups_per_class, likeness_groups
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
        columns = _behind_the_sums(classes, samples, settings.recipe.refined_images)
        with blas_threads(THREADS):
            rows, labels = scaled(tokens.refined(list(columns), tail)), np.array(list(columns.values()), np.int64)
            empty = FrozenStatistics.empty(rows.shape[1], 1)
            statistics = empty.with_images(rows, _nothing(rows), labels, len(classes))
            return cls(RefinedFeature.of(tail, statistics), statistics, columns)

    def held_out_scores(self, tokens: TokenCache, keys: Sequence[str], rng: np.random.Generator) -> RefinedScores:
        """The scores of images without those of their fold; images of a scene are in one fold: (n, C)."""
        features = tokens.refined(keys, self.feature.tail)
        behind, of_behind = list(self.columns), np.array(list(self.columns.values()), np.int64)
        likeness = likeness_groups(tokens.frozen(behind)[0], of_behind)
        place = {key: at for at, key in enumerate(behind)}
        asked = [place[key] for key in keys]
        rows = scaled(features)
        with blas_threads(THREADS):
            kept = LeaveOut(self.statistics, rows, _nothing(rows), of_behind[asked])
            counts = groups_per_class(likeness, of_behind, len(self.statistics.counts))
            left_out = left_out_scores(kept, rng, likeness[asked], counts)
        return RefinedScores(left_out.cosines, left_out.distances)


def left_out_refined(
    tokens: TokenCache,
    model: Model,
    samples: Samples,
    keys: Sequence[str],
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> RefinedScores | None:
    """The refined scores of held-out images as fresh ones would have them, by a model that keeps these samples: (n, C).

    All held-out images are divided into folds, so that none is scored with one of its scene in the statistics. None if
    the model has no refined feature, or if the images behind it are gone.
    """
    statistics = None
    if model.refined is not None:
        statistics = RefinedStatistics.of(tokens, model.refined.tail, model.classes, samples, settings)
    if statistics is None:
        return None
    out = statistics.feature.scores(tokens.refined(keys, statistics.feature.tail))
    held_out = [sample.key for sample in samples.held_out if sample.key in statistics.columns]
    place = {key: at for at, key in enumerate(held_out)}
    inside = [(row, place[key]) for row, key in enumerate(keys) if key in place]
    if inside:
        scores = statistics.held_out_scores(tokens, held_out, rng)
        rows, places = (list(part) for part in zip(*inside, strict=True))
        out.cosines[rows], out.distances[rows] = scores.cosines[places], scores.distances[places]
    return out


def _behind_the_sums(classes: Sequence[str], samples: Samples, most: int) -> dict[str, int]:
    """Kept images and their classes: at most `most`, as many of each class, held-out ones first.

    At least two of each class, of which one is not held out, so any held-out image can be left out.
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
