"""Left-out evidence: of known images by folds, of simulated novelty by leaving out a part of the classes in turn."""

import math
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Floats, FrozenScores
from models.inference.novelty import frozen_summaries
from trainer.learning.leave_out import LeaveOut
from trainer.learning.likeness import assign_folds, groups_per_class

# An image is left out with few others: fewer folds, if all images were kept, would give larger distances than fresh
# images have. Folds of the same share of the images in the statistics suffice where few of them are kept.
FOLDS, LEAST_FOLDS = 40, 5
CLASS_GROUPS = 4  # a quarter of the classes is left out in turn
LEAST_LEFT = 0.5  # groups of a class without a fold: where kept images are few of many, their number is an estimate
LEAST_INSIDE = 0.1  # share of a squared distance that stays
NONE = np.zeros(0, np.int64)


def left_out_scores(
    kept: LeaveOut,
    rng: np.random.Generator,
    likeness: NDArray[np.int64] | None = None,
    groups: Floats | None = None,
) -> FrozenScores:
    """The frozen scores of every kept image without its fold, as if its class had not lost one: (n, C).

    An image whose class has no other one is not left out. NaN marks its row. `likeness` groups, by default those of the
    features, stay together; `groups` (C,) is how many of them the statistics hold, by default estimated.
    """
    likeness = kept.likeness if likeness is None else likeness
    counts = kept.statistics.counts
    at_hand = len(kept.columns) / int(counts.sum())
    count = max(LEAST_FOLDS, math.ceil(FOLDS * at_hand))
    folds = assign_folds(kept.columns, likeness, count, rng, counts)
    shape = (len(kept.columns), len(counts))
    out = FrozenScores(*(np.full(shape, np.nan) for _ in fields(FrozenScores)))
    removed = np.zeros(len(kept.columns))  # groups of an image's class in its fold
    used = np.unique(folds[folds >= 0])
    freedom = max(kept.statistics.freedom - (folds >= 0).sum() / max(len(used), 1), 1.0)  # without a fold of mean size
    for fold in used:
        inside = np.flatnonzero(folds == fold)
        columns = kept.columns[inside]
        removed[inside] = groups_per_class(likeness[inside], columns, len(counts))[columns]
        scores = kept.scores(inside, inside, NONE, freedom)
        for field in fields(FrozenScores):
            getattr(out, field.name)[inside] = getattr(scores, field.name)
    if groups is None:
        own = np.bincount(kept.columns, minlength=len(counts))
        groups = groups_per_class(likeness, kept.columns, len(counts)) * counts / np.maximum(own, 1)
    rows = np.flatnonzero(folds >= 0)
    if len(rows):
        every = groups[kept.columns[rows]]
        _restore(out, kept, rows, every, np.maximum(every - removed[rows], LEAST_LEFT), freedom)
    return out


def _restore(
    scores: FrozenScores, kept: LeaveOut, rows: NDArray[np.int64], every: Floats, left: Floats, freedom: float
) -> None:
    """Correct the scores of left-out images for their own class, in place: its mean is of `left` groups, not `every`.

    Fresh images are compared with the mean of all n groups. If D is the squared distance between an image and the true
    mean of its class, a mean of n independent images is D / n away from the true one, in a random direction, and that
    of m images D / m. This moves left-out images away from their class: with five images per class, a threshold that
    should reject 5 % of fresh images would reject 3.5 %. The ridge output for a class grows as n q / (1 + n q).
    """
    own = rows, kept.columns[rows]
    full, output = (lengths[kept.columns[rows]] for lengths in kept.mean_lengths(freedom))
    share = (1 / left - 1 / every) / (1 + 1 / left)
    for distances, cosines, lengths in (
        (scores.distances, scores.cosines, full),
        (scores.output_distances, scores.output_cosines, output),
    ):
        excess = share * distances[own] ** 2
        if distances is scores.distances:
            inside = scores.span_distances[own] ** 2
            scores.span_distances[own] = np.sqrt(np.maximum(inside - excess, LEAST_INSIDE * inside))
        distances[own] = np.sqrt(distances[own] ** 2 - excess)
        cosines[own] = np.minimum(cosines[own] * np.sqrt(1 + excess / np.maximum(lengths, 1e-12)), 1.0)
    output_of = scores.ridge[own]
    grown = every * output_of / (left * (1 - output_of) + every * output_of)
    scores.ridge[own] = np.where((output_of > 0) & (output_of < 1), grown, output_of)


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
