"""Fit which class: the weights of a version's rule, on images that were left out.

The fit is drawn toward a prior, because the first tasks have few classes and images. `benchmarks.accuracy.prior`
computes the priors of both decisions on training images of several data sets.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from models.inference.cascade import Cascade
from models.inference.evidence import Evidence, Floats, FrozenScores, log_softmax
from models.inference.rules import FROZEN_TERMS, LOGIT, TERMS, TERMS_WITHOUT_OOD, Rule, term
from trainer.learning.prior import Prior

OUTPUTS = ("probability", LOGIT)  # the terms that alpha_k scales
OUTPUT_RIDGE = 1e-3  # draws (alpha_k, beta_k) toward (1, 0): separable images have no optimum without it
LEAST_SCALE = 1e-3


def fit_rule(evidence: Evidence, columns: NDArray[np.int64], prior: Prior, near: Rule | None = None) -> Rule:
    """The weights and the output calibration with the least cross-entropy on n left-out images.

    `near`: a rule that is expected to be close, where the search starts.

    `columns` are the true classes, as columns of the scores. The weights refer to evidence with a deviation of 1 over
    the classes of an image, so that a prior holds for any number of classes and any backbone.
    """
    tasks, names = len(evidence.counts), TERMS if evidence.has_ood else TERMS_WITHOUT_OOD
    terms = np.stack([term(evidence, name) for name in names], axis=2)  # (n, C, terms)
    scale = _deviation(terms, evidence)
    start = np.array([prior.rule[name] for name in TERMS])  # the logits have the prior of the probability
    if len(columns) == 0 or terms.shape[1] < 2:
        return _rule(names, start / scale, np.ones(tasks), np.zeros(tasks))
    n, classes = terms.shape[:2]
    others = np.ascontiguousarray((terms[:, :, 1:] / scale[1:]).transpose(2, 0, 1)).reshape(len(names) - 1, -1)
    outputs = TaskOutputs(evidence)

    def loss(at: Floats) -> tuple[float, Floats]:
        weights, scales, shifts = np.split(at, [len(names), len(names) + tasks])
        said = outputs.values(scales)
        scores = (weights[1:] @ others).reshape(n, classes) + said * (weights[0] / scale[0])
        value, slope = cross_entropy(scores + evidence.per_class(shifts), columns)
        value += prior.rule_strength / 2 * float(((weights - start) ** 2).sum())
        value += prior.output_strength / 2 * float(((scales - 1) ** 2).sum() + (shifts**2).sum())
        of_weights = np.append((slope * said).sum() / scale[0], others @ slope.ravel())
        of_scales = outputs.gradient(slope) * (weights[0] / scale[0])
        of_shifts = np.add.reduceat(slope.sum(axis=0), evidence.starts)
        gradient = [
            of_weights + prior.rule_strength * (weights - start),
            of_scales + prior.output_strength * (scales - 1),
            of_shifts + prior.output_strength * shifts,
        ]
        return value, np.concatenate(gradient)

    first = [start, np.ones(tasks), np.zeros(tasks)]
    if near is not None:
        first = [np.array([near.weights[name] for name in names]) * scale, np.array(near.scales), np.array(near.shifts)]
    found = minimise(loss, np.concatenate(first), 50)
    weights, scales, shifts = np.split(found, [len(names), len(names) + tasks])
    return _rule(names, np.maximum(weights, 0.0) / scale, scales, shifts)


def fit_outputs(rule: Rule, evidence: Evidence, columns: NDArray[np.int64]) -> Rule:
    """The rule with the paper's output calibration (+c): alpha_k, beta_k of least cross-entropy on n images."""
    tasks = len(evidence.counts)
    if len(columns) == 0 or tasks < 2:
        return rule
    outputs = TaskOutputs(evidence)
    fixed = replace(rule, weights={name: rule.weights[name] for name in rule.weights if name not in OUTPUTS})
    rest, n = fixed.log_scores(evidence), len(columns)
    weight = sum(rule.weights.get(name, 0.0) for name in OUTPUTS)

    def loss(at: Floats) -> tuple[float, Floats]:
        scales, shifts = np.split(at, 2)
        value, slope = cross_entropy(rest + weight * outputs.values(scales) + evidence.per_class(shifts), columns)
        value = value / n + OUTPUT_RIDGE / 2 * float(((scales - 1) ** 2).sum() + (shifts**2).sum())
        of_scales = weight * outputs.gradient(slope) / n + OUTPUT_RIDGE * (scales - 1)
        of_shifts = np.add.reduceat(slope.sum(axis=0), evidence.starts) / n + OUTPUT_RIDGE * shifts
        return value, np.concatenate([of_scales, of_shifts])

    alpha, beta = np.split(minimise(loss, np.concatenate([np.ones(tasks), np.zeros(tasks)]), 100), 2)
    alpha = np.maximum(alpha, LEAST_SCALE)
    return replace(rule, scales=tuple(alpha.tolist()), shifts=tuple(beta.tolist()))


class TaskOutputs:
    """What each task says of its classes (n, C), with its logits multiplied by a scale per task.

    Log-probabilities of heads with `ood`, otherwise the logits themselves. All tasks at once: a loop over them would
    take most of the time of a fit.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._mean = np.zeros_like(evidence.ood_logits)  # (n, T), of a task's logits, under their probabilities

    def values(self, scales: Floats) -> Floats:
        evidence = self._evidence
        logits = evidence.class_logits * evidence.per_class(scales)
        if not evidence.has_ood:
            return logits
        ood = evidence.ood_logits * scales
        top = np.maximum(np.maximum.reduceat(logits, evidence.starts, axis=1), ood)
        shifted = logits - evidence.per_class(top)
        share, ood_share = np.exp(shifted), np.exp(ood - top)
        total = np.add.reduceat(share, evidence.starts, axis=1) + ood_share
        weighted = np.add.reduceat(share * evidence.class_logits, evidence.starts, axis=1)
        self._mean = (weighted + ood_share * evidence.ood_logits) / total
        return shifted - evidence.per_class(np.log(total))

    def gradient(self, slope: Floats) -> Floats:
        """Of a function with this slope (n, C) over the last values, over the scales: (T,)."""
        starts = self._evidence.starts
        own = np.add.reduceat((slope * self._evidence.class_logits).sum(axis=0), starts)
        if not self._evidence.has_ood:
            return own
        out: Floats = own - (np.add.reduceat(slope, starts, axis=1) * self._mean).sum(axis=0)
        return out


def cross_entropy(scores: Floats, columns: NDArray[np.int64]) -> tuple[float, Floats]:
    """The sum over images of the cross-entropy with their classes, and its slope over the scores: (n, C)."""
    log_shares, own = log_softmax(scores), (np.arange(len(columns)), columns)
    slope = np.exp(log_shares)
    slope[own] -= 1
    return -float(log_shares[own].sum()), slope


def minimise(loss: Callable[[Floats], tuple[float, Floats]], start: Floats, steps: int) -> Floats:
    """L-BFGS, from a function that gives value and gradient."""
    at = torch.from_numpy(start.copy())
    optimiser = torch.optim.LBFGS([at], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> float:
        value, gradient = loss(at.numpy())
        at.grad = torch.from_numpy(gradient)
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return at.numpy()


def _rule(names: Sequence[str], weights: Floats, scales: Floats, shifts: Floats) -> Rule:
    named = dict(zip(names, weights.tolist(), strict=True))
    return Rule("fitted", named, tuple(scales.tolist()), tuple(shifts.tolist()))


def _deviation(terms: Floats, evidence: Evidence) -> Floats:
    """The mean over images of each term's deviation over classes; 1 where there is none.

    Classes whose networks did not run have no values of their own, so they do not count.
    """
    if len(terms) == 0:
        return np.ones(terms.shape[2])
    if evidence.ran is None:
        deviation = mean_deviations([terms[:, :, t] for t in range(terms.shape[2])])
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
    deviation = mean_deviations([left_out.term(name) for name in FROZEN_TERMS])
    scale = np.where(deviation > 1e-9, deviation, 1.0)
    return {name: prior.rule[name] / float(own) for name, own in zip(FROZEN_TERMS, scale, strict=True)}


def mean_deviations(terms: Sequence[Floats]) -> Floats:
    """The mean over images of the deviation over classes of each term (n, C); 0 without images."""
    return np.array([float(own.std(axis=1).mean()) if len(own) else 0.0 for own in terms])
