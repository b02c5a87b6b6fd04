"""Left-out evidence: of known images by folds, of simulated novelty by leaving out a part of the classes in turn."""

import math
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Floats, FrozenScores
from models.inference.novelty import frozen_summaries
from trainer.learning.leave_out import LeaveOut
from trainer.learning.likeness import assign_folds

# An image is left out with few others: fewer folds, if all images were kept, would give larger distances than fresh
# images have. Folds of the same share of the images in the statistics suffice where few of them are kept.
FOLDS, LEAST_FOLDS = 40, 5
CLASS_GROUPS = 4  # a quarter of the classes is left out in turn
NONE = np.zeros(0, np.int64)


def left_out_scores(
    kept: LeaveOut, rng: np.random.Generator, likeness: NDArray[np.int64] | None = None
) -> FrozenScores:
    """The frozen scores of every kept image without its fold: (n, C).

    An image whose class has no other one is not left out. NaN marks its row. `likeness` groups, by default those of the
    features, stay together.
    """
    at_hand = len(kept.columns) / int(kept.statistics.counts.sum())
    count = max(LEAST_FOLDS, math.ceil(FOLDS * at_hand))
    groups = kept.likeness if likeness is None else likeness
    folds = assign_folds(kept.columns, groups, count, rng, kept.statistics.counts)
    shape = (len(kept.columns), len(kept.statistics.counts))
    out = FrozenScores(*(np.full(shape, np.nan) for _ in fields(FrozenScores)))
    used = np.unique(folds[folds >= 0])
    freedom = kept.statistics.freedom - (folds >= 0).sum() / max(len(used), 1)  # without a fold of the mean size
    for fold in used:
        inside = np.flatnonzero(folds == fold)
        scores = kept.scores(inside, inside, NONE, max(freedom, 1.0))
        for field in fields(FrozenScores):
            getattr(out, field.name)[inside] = getattr(scores, field.name)
    return out


def simulated_novelty(kept: LeaveOut, rng: np.random.Generator) -> list[tuple[Floats, Floats]]:
    """(summaries of known images, summaries of novel images) of each simulation, standardised by the known ones.

    Each simulation leaves out a part of the classes, whose images are then novel, and a fold of the other classes'
    images, which are then fresh. Empty with fewer than two classes.
    """
    present = np.unique(kept.columns)
    parts = min(CLASS_GROUPS, len(present))
    classes = rng.permutation(present)
    folds = assign_folds(kept.columns, kept.likeness, CLASS_GROUPS, rng)
    # What remains in the mean: the other classes, without a fold, and the images that are not at hand.
    at_hand = len(kept.columns) / int(kept.statistics.counts.sum())
    freedom = kept.statistics.freedom * (1 - at_hand * (1 - (1 - 1 / max(parts, 2)) * (1 - 1 / CLASS_GROUPS)))
    out = []
    for part in range(parts if parts > 1 else 0):
        left = classes[part::parts]
        is_novel = np.isin(kept.columns, left)
        fresh, novel = np.flatnonzero(~is_novel & (folds == part)), np.flatnonzero(is_novel)
        if len(fresh) == 0:
            continue
        both = frozen_summaries(kept.scores(np.concatenate([fresh, novel]), fresh, left, max(freedom, 1.0)))
        centre, scale = standard(both[: len(fresh)])
        both = (both - centre) / scale
        out.append((both[: len(fresh)], both[len(fresh) :]))
    return out


def standard(summaries: Floats) -> tuple[Floats, Floats]:
    """Mean and deviation of each column; a column without variance is left as it is."""
    deviation = summaries.std(axis=0)
    return summaries.mean(axis=0), np.where(deviation > 1e-12, deviation, 1.0)
