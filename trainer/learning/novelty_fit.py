"""Fit whether novel: the novelty score of a version, its threshold and `p_novel`, on simulated novelty.

The fit is drawn toward a prior, as that of the rule is (`rule_fit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Evidence, Floats, FrozenScores, RefinedScores
from models.inference.novelty import (
    FROZEN_SUMMARIES,
    REFINED_SUMMARIES,
    SUMMARIES,
    Novelty,
    frozen_summaries,
    quantiles,
    refined_summaries,
)
from models.inference.rules import Rule
from trainer.learning.prior import APART, FROZEN, KNOWN, Prior
from trainer.learning.simulation import standard

LEAST_IMAGES, MOST_SPREAD = 3, 4.0  # of images that show how much the scores of draws must be spread
LEAST_HELD_OUT = 8  # images that show how the refined feature goes with the frozen one
LEAST_FREEDOM = 9.0  # of the spread of known scores: fewer than ten images do not make it unknown
ANGLES = 20_000  # of the distribution of t: its quantiles to a thousandth
RESIDUALS = 32  # quantiles of what the refined score of a held-out image has beside the frozen one
LEAST_SLOPE = 0.05  # of p_novel over the score, relative to the prior's
# What simulated novelty weighs against the prior, in images, per pair of classes. It shows how classes differ from each
# other, and more images of the same few classes show no more of that. Chosen on training images of the four data sets.
PAIR_WEIGHT = 0.5


@dataclass(frozen=True)
class Target:
    """What the threshold must do: accept a share of known images, or flag a share of simulated novel ones."""

    accept: float = 0.95
    flag: float | None = None


def fit_novelty(
    left_out: FrozenScores,
    simulations: Sequence[tuple[Floats, Floats]],
    prior: Prior,
    target: Target,
    weights: Floats | None = None,
    drawn: NDArray[np.bool_] | None = None,
) -> Novelty:
    """The novelty score of frozen evidence, from left-out known images and from simulated novelty.

    `weights` is what each of the former says about fresh images (`independent_weights`), by default the same; `drawn`
    says which of them are draws, by default none.
    """
    known = frozen_summaries(left_out)
    left = ~np.isnan(known).any(axis=1)
    known, said = known[left], None if weights is None else weights[left]
    centre, scale = standard(known)
    start = np.array([prior.novelty[name] for name in FROZEN_SUMMARIES] + [prior.novelty[KNOWN]])
    rows, is_known = _rows(simulations)
    weight = PAIR_WEIGHT * left_out.distances.shape[1] ** 2
    if len(rows):
        strength = np.append(np.full(len(start) - 1, prior.novelty_strength), 1.0)
        fitted = logistic_regression(rows, is_known, start, strength, weight)[:-1]
    else:
        fitted = start[:-1]
    scores = ((known - centre) / scale) @ fitted
    if drawn is not None:
        scores = spread_as_images(scores, drawn[left])
    logistic = falling_p_novel(rows @ fitted, is_known, np.array([1.0, start[-1]]), np.ones(2), weight)
    simulated = (rows @ fitted)[is_known == 0]
    others = len(SUMMARIES) - len(FROZEN_SUMMARIES)
    return Novelty(
        centre=np.append(centre, np.zeros(others)),
        scale=np.append(scale, np.ones(others)),
        weights=np.append(fitted, np.zeros(others)),
        logistic=logistic,
        threshold=np.array([threshold(scores, simulated, target, said)]),
        known=quantiles(scores, said),
        simulated=quantiles(simulated),
    )


def with_refined(
    novelty: Novelty,
    left_out: FrozenScores,
    held_out: NDArray[np.bool_],
    refined: RefinedScores,
    simulations: Sequence[tuple[Floats, Floats]],
    prior: Prior,
    target: Target,
    weights: Floats,
) -> Novelty:
    """The decision with the refined feature beside the frozen one; `held_out` images have these refined scores.

    The adapters have seen the other images, and images of every class, so no class can be left out of them: how both
    features compare is the prior's. Of all left-out and of simulated novel images the frozen evidence is known. Their
    refined summaries follow it as those of held-out images do: by a line, and the residuals about it. So the threshold
    rests on all left-out images, of which there are several times as many. Those of novel images are apart from the
    line of known ones, as far as the prior says. With few held-out images the decision stays.
    """
    if float(weights[held_out].sum()) < LEAST_HELD_OUT:
        return novelty
    frozen, own = slice(len(FROZEN_SUMMARIES)), slice(len(FROZEN_SUMMARIES), -1)
    of_frozen, *of_refined = (prior.refined_novelty[name] for name in (FROZEN, *REFINED_SUMMARIES))
    centre, scale, combined = novelty.centre.copy(), novelty.scale.copy(), novelty.weights * of_frozen
    summaries = refined_summaries(refined)
    centre[own], scale[own] = standard(summaries)
    combined[own] = of_refined
    by_frozen = ((frozen_summaries(left_out) - centre[frozen]) / scale[frozen]) @ novelty.weights[frozen]
    by_refined = ((summaries - centre[own]) / scale[own]) @ combined[own]
    slope, intercept, residuals = _line(by_frozen[held_out], by_refined, weights[held_out])

    def sums(scores: Floats) -> Floats:
        """Combined scores: each frozen score with its predicted refined scores. (n,) -> (n, residuals)"""
        return ((of_frozen + slope) * scores + intercept)[:, None] + residuals

    left = ~np.isnan(by_frozen)
    said = np.repeat(weights[left] / len(residuals), len(residuals))
    known = sums(by_frozen[left]).ravel()
    rows, is_known = _rows(simulations)
    novel = rows[is_known == 0]
    simulated = (sums(novel @ novelty.weights[frozen]) + prior.refined_novelty[APART]).ravel()
    logistic = np.array([1.0, prior.refined_novelty[KNOWN]])
    if len(simulated):
        both, labels = np.concatenate([known, simulated]), np.repeat([1.0, 0.0], [len(known), len(simulated)])
        weight = PAIR_WEIGHT * left_out.distances.shape[1] ** 2
        logistic = falling_p_novel(both, labels, logistic, np.ones(2), weight)
    return replace(
        novelty,
        centre=centre,
        scale=scale,
        weights=combined,
        logistic=logistic,
        threshold=np.array([threshold(known, simulated, target, said)]),
        known=quantiles(known, said, int(left.sum())),
        simulated=quantiles(simulated, most=len(novel)),
    )


def _line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float, Floats]:
    """(slope, intercept, quantiles of the residuals) of the regression of y on x; a flat line if x does not vary."""
    centre_x, centre_y = float(np.average(x, weights=weights)), float(np.average(y, weights=weights))
    variance = float(np.average((x - centre_x) ** 2, weights=weights))
    covariance = float(np.average((x - centre_x) * (y - centre_y), weights=weights))
    slope = covariance / variance if variance > 1e-12 else 0.0
    intercept = centre_y - slope * centre_x
    residuals = y - slope * x - intercept
    spread = np.quantile(quantiles(residuals, weights), (np.arange(RESIDUALS) + 0.5) / RESIDUALS)
    spread -= spread.mean()
    # The line is fitted to these images, and the quantiles have no tails: residuals of other images are wider.
    images = float(weights.sum())
    deviation = np.sqrt(float((weights * residuals**2).sum()) / max(images - 2, 1.0))
    return slope, intercept, spread * (deviation / max(float(spread.std()), 1e-12))


def spread_as_images(scores: Floats, drawn: NDArray[np.bool_]) -> Floats:
    """Scores of draws with the deviation of the images' scores: draws of a class are more alike than its images."""
    if not drawn.any() or (~drawn).sum() < LEAST_IMAGES:
        return scores
    own = scores[drawn]
    factor = np.clip(scores[~drawn].std() / max(float(own.std()), 1e-12), 1.0, MOST_SPREAD)
    out = scores.copy()
    out[drawn] = own.mean() + (own - own.mean()) * factor
    return out


def paper_novelty(rule: Rule, evidence: Evidence, columns: NDArray[np.int64], target: Target) -> Novelty:
    """The paper's score, that of the best class; images of each task are novel to the other tasks."""
    log_scores = rule.log_scores(evidence)
    scores = log_scores.max(axis=1)
    task = np.repeat(np.arange(len(evidence.counts)), evidence.counts)
    others = np.where(task == task[columns][:, None], -np.inf, log_scores).max(axis=1)
    simulated = others[np.isfinite(others)]
    limit = threshold(scores, simulated, target)
    spread = max(float(scores.std()), 1e-6)
    logistic = np.array([1 / spread, -limit / spread])
    if len(simulated):
        both, known = np.concatenate([scores, simulated]), np.repeat([1.0, 0.0], [len(scores), len(simulated)])
        logistic = falling_p_novel(both, known, logistic, np.full(2, 1e-3), float(len(scores)))
    size = len(SUMMARIES)
    return Novelty(
        centre=np.zeros(size),
        scale=np.ones(size),
        weights=np.eye(size)[-1],
        logistic=logistic,
        threshold=np.array([limit]),
        known=quantiles(scores),
        simulated=quantiles(simulated),
    )


def falling_p_novel(scores: Floats, known: Floats, prior: Floats, strength: Floats, images: float) -> Floats:
    """Slope and intercept of the log-odds of being known over the score; the slope is positive.

    With few classes, simulated novel images may score above known ones. They then say nothing about the probability,
    and the prior stays: p_novel must fall in the score, because the threshold is a bound of both.
    """
    if len(scores) == 0:
        return prior
    fitted = logistic_regression(scores[:, None], known, prior, strength, images)
    return fitted if fitted[0] >= LEAST_SLOPE * prior[0] else prior


def threshold(known: Floats, novel: Floats, target: Target, weights: Floats | None = None) -> float:
    """The score below which an image is novel, by conformal quantile.

    A fresh image is below the k-th lowest of n left-out ones with probability k / (n + 1). The threshold is at the
    place where that is 1 - accept, interpolated between two images: the place before it rejects fewer images than
    asked, with few images far fewer. Before the first place, the threshold is a prediction interval of Student's t; of
    a single image, whose spread is taken for 1.
    `weights` say how many images each stands for, by default one: many near-duplicates of one class would move the
    place to where other classes are rejected.
    """
    if target.flag is not None and len(novel):
        return float(np.quantile(novel, target.flag, method="higher"))
    weights = np.ones(len(known)) if weights is None else weights
    images = float(weights.sum())
    place = (1 - target.accept) * (images + 1)
    if place >= 1:
        order = np.argsort(known, kind="stable")
        own = weights[order]
        return float(np.interp(place, np.cumsum(own) - own / 2 + 0.5, known[order]))
    mean, spread = float(known.mean() if len(known) else 0.0), 1.0
    if len(known) > 1:
        mean = float(np.average(known, weights=weights))
        spread = max(float(np.sqrt((weights * (known - mean) ** 2).sum() / max(images - 1, 1.0))), 1e-6)
    quantile = _t_quantile(target.accept, max(images - 1, LEAST_FREEDOM))
    return mean - quantile * spread * float(np.sqrt(1 + 1 / max(images, 1)))


def _t_quantile(share: float, freedom: float) -> float:
    """A quantile of Student's t distribution: t is sqrt(freedom) tan(angle), with density cos(angle)^(freedom - 1)."""
    angles = ((np.arange(ANGLES) + 0.5) / ANGLES - 0.5) * np.pi
    mass = np.cos(angles) ** (freedom - 1)
    below = np.cumsum(mass) - mass / 2
    return float(np.sqrt(freedom) * np.tan(np.interp(share * mass.sum(), below, angles)))


def _rows(simulations: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """(summaries of all simulated images, 1 for known and 0 for novel)"""
    size = len(FROZEN_SUMMARIES)
    known = np.concatenate([np.zeros((0, size)), *(known for known, _ in simulations)])
    novel = np.concatenate([np.zeros((0, size)), *(novel for _, novel in simulations)])
    return np.concatenate([known, novel]), np.repeat([1.0, 0.0], [len(known), len(novel)])


def logistic_regression(rows: Floats, known: Floats, prior: Floats, strength: Floats, images: float) -> Floats:
    """Weights, and a constant last, of the log-odds of being known; known and novel rows count equally in sum.

    `images` is what all rows together weigh against the prior: the simulations use an image more than once.
    """
    design = np.column_stack([rows, np.ones(len(rows))])
    share = np.where(known == 1, 0.5 / max(known.sum(), 1), 0.5 / max((1 - known).sum(), 1)) * images
    weights = prior.astype(np.float64)
    for _ in range(50):  # Newton's method on a convex loss
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -50, 50)))
        gradient = design.T @ (share * (p - known)) + strength * (weights - prior)
        hessian = (design * (share * p * (1 - p))[:, None]).T @ design + np.diag(strength)
        step = np.linalg.solve(hessian, gradient)
        weights = weights - step / max(1.0, float(np.abs(step).max()))  # far from the optimum a full step overshoots
        if float(np.abs(step).max()) < 1e-9:
            break
    return weights
