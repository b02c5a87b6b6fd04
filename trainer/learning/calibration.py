"""Fit the two decisions of a version on images that were left out: the weights of its rule, its novelty score.

Both fits are drawn toward a prior, because the first tasks have few classes and images. `benchmarks.accuracy.prior`
computes the priors on training images of several data sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from models.inference.cascade import Cascade
from models.inference.evidence import Evidence, Floats, FrozenScores
from models.inference.novelty import SUMMARIES, Novelty, frozen_summaries, quantiles
from models.inference.rules import FROZEN_TERMS, TERMS, Rule, term
from trainer.learning.prior import Prior
from trainer.learning.simulation import standard

LEAST_SLOPE = 0.05  # of p_novel over the score, relative to the prior's
# What simulated novelty weighs against the prior, in images, per pair of classes. It shows how classes differ from each
# other, and more images of the same few classes show no more of that. Chosen on training images of the four data sets.
PAIR_WEIGHT = 0.5


def fit_rule(evidence: Evidence, columns: NDArray[np.int64], prior: Prior) -> Rule:
    """The weights and the output calibration with the least cross-entropy on n left-out images.

    `columns` are the true classes, as columns of the scores. The weights refer to evidence with a deviation of 1 over
    the classes of an image, so that a prior holds for any number of classes and any backbone.
    """
    tasks = len(evidence.counts)
    terms = np.stack([term(evidence, name) for name in TERMS], axis=2)  # (n, C, terms)
    scale = _deviation(terms, evidence)
    start = np.array([prior.rule[name] for name in TERMS])
    if len(columns) == 0 or terms.shape[1] < 2:
        return _rule(start / scale, np.ones(tasks), np.zeros(tasks))
    others = torch.from_numpy(terms[:, :, 1:] / scale[1:])
    logits = [torch.from_numpy(x) for x in evidence.logits]
    target = torch.from_numpy(columns)
    initial = torch.from_numpy(start)
    weights = initial.clone().requires_grad_()
    scales = torch.ones(tasks, dtype=torch.float64, requires_grad=True)
    shifts = torch.zeros(tasks, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights, scales, shifts], max_iter=50, line_search_fn="strong_wolfe")
    repeat = torch.tensor(evidence.counts)

    def loss() -> torch.Tensor:
        probability = torch.cat([torch.log_softmax(x * scales[k], dim=1)[:, :-1] for k, x in enumerate(logits)], dim=1)
        scores = others @ weights[1:] + probability * (weights[0] / scale[0])
        scores = scores + torch.repeat_interleave(shifts, repeat)
        value = torch.nn.functional.cross_entropy(scores, target, reduction="sum")
        value = value + prior.rule_strength / 2 * ((weights - initial) ** 2).sum()
        return value + prior.output_strength / 2 * (((scales - 1) ** 2).sum() + (shifts**2).sum())

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    fitted = np.maximum(weights.detach().numpy(), 0.0)
    return _rule(fitted / scale, scales.detach().numpy(), shifts.detach().numpy())


def _rule(weights: Floats, scales: Floats, shifts: Floats) -> Rule:
    named = dict(zip(TERMS, weights.tolist(), strict=True))
    return Rule("fitted", named, tuple(scales.tolist()), tuple(shifts.tolist()))


def _deviation(terms: Floats, evidence: Evidence) -> Floats:
    """The mean over images of each term's deviation over classes; 1 where there is none.

    Classes whose networks did not run have no values of their own, so they do not count.
    """
    if len(terms) == 0:
        return np.ones(terms.shape[2])
    if evidence.ran is None:
        deviation = terms.std(axis=1).mean(axis=0)
    else:
        ran = np.repeat(evidence.ran, evidence.counts, axis=1)
        deviation = np.nanmean(np.nanstd(np.where(ran[:, :, None], terms, np.nan), axis=1), axis=0)
    return np.where(deviation > 1e-9, deviation, 1.0)


def fit_cascade(
    left_out: FrozenScores, columns: NDArray[np.int64], counts: tuple[int, ...], prior: Prior, most: int, share: float
) -> Cascade:
    """The cascade whose margin includes the own task of this share of left-out images; `most` networks run at most.

    The weights are the prior's: which networks run must be known before the rule is fitted on what they say.
    """
    rows = np.asarray(~np.isnan(left_out.ridge).any(axis=1))
    known = left_out.rows(rows)
    everything = Cascade(prior_weights(known, prior), np.inf, most)
    if not rows.any() or len(counts) < 2:
        return replace(everything, margin=float(np.finfo(np.float64).max))
    scores = everything.task_scores(known, counts)
    own = np.repeat(np.arange(len(counts)), counts)[columns[rows]]
    gaps = scores.max(axis=1) - np.take_along_axis(scores, own[:, None], axis=1)[:, 0]
    return replace(everything, margin=float(np.quantile(gaps, share, method="higher")))


def prior_weights(left_out: FrozenScores, prior: Prior) -> dict[str, float]:
    """The prior's weights of the frozen terms, for terms as they are."""
    terms = np.stack([left_out.term(name) for name in FROZEN_TERMS], axis=2)
    deviation = terms.std(axis=1).mean(axis=0) if len(terms) else np.zeros(len(FROZEN_TERMS))
    scale = np.where(deviation > 1e-9, deviation, 1.0)
    return {name: prior.rule[name] / float(own) for name, own in zip(FROZEN_TERMS, scale, strict=True)}


@dataclass(frozen=True)
class Target:
    """What the threshold must do: accept a share of known images, or flag a share of simulated novel ones."""

    accept: float = 0.95
    flag: float | None = None


def fit_novelty(
    left_out: FrozenScores, simulations: Sequence[tuple[Floats, Floats]], prior: Prior, target: Target
) -> Novelty:
    """The novelty score of frozen evidence, from left-out known images and from simulated novelty."""
    known = frozen_summaries(left_out)
    known = known[~np.isnan(known).any(axis=1)]
    centre, scale = standard(known)
    start = np.array([prior.novelty[name] for name in SUMMARIES[:-1]] + [prior.novelty["known"]])
    rows, is_known = _rows(simulations)
    weight = PAIR_WEIGHT * left_out.distances.shape[1] ** 2
    if len(rows):
        strength = np.append(np.full(len(start) - 1, prior.novelty_strength), 1.0)
        weights = logistic_regression(rows, is_known, start, strength, weight)[:-1]
    else:
        weights = start[:-1]
    scores = ((known - centre) / scale) @ weights
    logistic = falling_p_novel(rows @ weights, is_known, np.array([1.0, start[-1]]), np.ones(2), weight)
    simulated = (rows @ weights)[is_known == 0]
    return Novelty(
        centre=np.append(centre, 0.0),
        scale=np.append(scale, 1.0),
        weights=np.append(weights, 0.0),
        logistic=logistic,
        threshold=np.array([threshold(scores, simulated, target)]),
        known=quantiles(scores),
        simulated=quantiles(simulated),
    )


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


def threshold(known: Floats, novel: Floats, target: Target) -> float:
    """The score below which an image is novel, by conformal quantile.

    Of n left-out known images, the one at place floor((1 - accept)(n + 1)) bounds the share of fresh images below it.
    Too few images for that place are extrapolated as a normal distribution.
    """
    if target.flag is not None and len(novel):
        return float(np.quantile(novel, target.flag, method="higher"))
    place = int(np.floor((1 - target.accept) * (len(known) + 1)))
    if place >= 1:
        return float(np.sort(known)[place - 1])
    spread = max(float(known.std()), 1e-6) if len(known) > 1 else 1.0
    return float(known.mean() - _normal_quantile(target.accept) * spread * np.sqrt(1 + 1 / max(len(known), 1)))


def _normal_quantile(share: float) -> float:
    return float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)))


def _rows(simulations: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """(summaries of all simulated images, 1 for known and 0 for novel)"""
    size = len(SUMMARIES) - 1
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
