"""Fit which networks of a transformer run for an image: the cascade, from frozen scores of left-out images."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.inference.cascade import NEVER, Cascade, leads, task_scores
from models.inference.evidence import Floats, FrozenScores
from trainer.learning.prior import Prior
from trainer.learning.rule_fit import prior_weights


def fit_cascade(
    left_out: FrozenScores,
    columns: NDArray[np.int64],
    counts: tuple[int, ...],
    prior: Prior,
    most: int,
    share: float,
    sure_share: float,
) -> Cascade:
    """The cascade whose margin includes the own task of a share of left-out images; `most` networks run at most.

    No network runs for images of which the frozen evidence is sure: at least `sure_share` of the left-out ones have the
    class that it says. The weights are the prior's: which networks run must be known before the rule is fitted on what
    they say.
    """
    rows = left_out.complete
    known, own = left_out.rows(rows), columns[rows]
    cascade = Cascade(prior_weights(known, prior), NEVER, most)
    if not rows.any():
        return cascade
    classes = cascade.class_scores(known)
    scores, task = task_scores(classes, counts), np.repeat(np.arange(len(counts)), counts)[own]
    gaps = scores.max(axis=1) - np.take_along_axis(scores, task[:, None], axis=1)[:, 0]
    margin = float(np.quantile(gaps, share, method="higher")) if len(counts) > 1 else NEVER
    return replace(cascade, margin=margin, sure=_sure(leads(classes), classes.argmax(axis=1) == own, sure_share))


def _sure(lead: Floats, right: NDArray[np.bool_], share: float) -> float:
    """The least lead from which on at least this share of images is right, one more wrong image included.

    The additional one is for fresh images: a few right ones prove little.
    """
    order = np.argsort(-lead, kind="stable")
    wrong = (np.cumsum(~right[order]) + 1) / (np.arange(len(order)) + 2)
    enough = np.flatnonzero(wrong <= 1 - share)
    return float(lead[order[enough[-1]]]) if len(enough) else NEVER
