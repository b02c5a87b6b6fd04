"""Fit which class where the networks count: the weights of a version's rule, on images that were left out.

The fit is drawn toward a prior, because the first tasks have few classes and images. `benchmarks.accuracy.prior`
computes the priors of both decisions on training images of several data sets.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from models.inference.evidence import Evidence, Floats, FrozenScores
from models.inference.rules import FROZEN_TERMS, LOGIT, TERMS, TERMS_WITHOUT_OOD, Rule, term
from trainer.learning.prior import Prior

OUTPUTS = ("probability", LOGIT)  # the terms that alpha_k scales
OUTPUT_RIDGE = 1e-3  # draws (alpha_k, beta_k) toward (1, 0): separable images have no optimum without it
LEAST_SCALE = 1e-3
TOLERANCE = 1e-2  # of the gradient of a sum over images


def fit_rule(evidence: Evidence, columns: NDArray[np.int64], prior: Prior, near: Rule | None = None) -> Rule:
    """The weights and the output calibration with the least cross-entropy on n left-out images.

    `near`: a rule that is expected to be close, where the search starts.

    `columns` are the true classes, as columns of the scores. The weights refer to evidence with a deviation of 1 over
    the classes of an image, so that a prior holds for any number of classes and any backbone.
    """
    tasks = len(evidence.counts)
    names = TERMS if evidence.has_ood else TERMS_WITHOUT_OOD
    terms = np.stack([term(evidence, name) for name in names], axis=2)  # (n, C, terms)
    scale = _deviation(terms, evidence)
    # The logits have the prior of the probability.
    start = np.array([prior.rule["probability" if name == LOGIT else name] for name in names])
    if len(columns) == 0 or terms.shape[1] < 2:
        return _rule(names, start / scale, np.ones(tasks), np.zeros(tasks))
    # Classes first, (C, n) per term: sums over the classes of an image or of a task then run over whole rows.
    others = np.ascontiguousarray((terms[:, :, 1:] / scale[1:]).transpose(2, 1, 0))
    classes, n = others.shape[1:]
    others = others.reshape(len(names) - 1, -1)
    outputs = TaskOutputs(evidence)
    ran = np.ones(n) if evidence.ran is None else evidence.ran.any(axis=1).astype(np.float64)

    def loss(at: Floats) -> tuple[float, Floats]:
        weights, scales, shifts = np.split(at, [len(names), len(names) + tasks])
        said = outputs.values(scales)
        of_networks = said * (weights[0] / scale[0]) + evidence.per_class(shifts)[:, None]
        value, slope = cross_entropy((weights[1:] @ others).reshape(classes, n) + of_networks * ran, columns)
        value += prior.rule_strength / 2 * float(((weights - start) ** 2).sum())
        value += prior.output_strength / 2 * float(((scales - 1) ** 2).sum() + (shifts**2).sum())
        of_others = others @ slope.ravel()
        slope *= ran
        of_weights = np.append(np.vdot(slope, said) / scale[0], of_others)
        of_scales = outputs.gradient(slope) * (weights[0] / scale[0])
        of_shifts = np.add.reduceat(slope.sum(axis=1), evidence.starts)
        gradient = [
            of_weights + prior.rule_strength * (weights - start),
            of_scales + prior.output_strength * (scales - 1),
            of_shifts + prior.output_strength * shifts,
        ]
        return value, np.concatenate(gradient)

    first = [start, np.ones(tasks), np.zeros(tasks)]
    if near is not None:
        first = [np.array([near.weights[name] for name in names]) * scale, np.array(near.scales), np.array(near.shifts)]
    found = minimise(loss, np.concatenate(first), 50, TOLERANCE)
    weights, scales, shifts = np.split(found, [len(names), len(names) + tasks])
    return _rule(names, np.maximum(weights, 0.0) / scale, scales, shifts)


def fit_outputs(rule: Rule, evidence: Evidence, columns: NDArray[np.int64]) -> Rule:
    """The rule with the paper's output calibration (+c): alpha_k, beta_k of least cross-entropy on n images."""
    tasks = len(evidence.counts)
    if len(columns) == 0 or tasks < 2:
        return rule
    outputs = TaskOutputs(evidence)
    fixed = replace(rule, weights={name: rule.weights[name] for name in rule.weights if name not in OUTPUTS})
    rest, n = fixed.log_scores(evidence).T, len(columns)
    weight = sum(rule.weights.get(name, 0.0) for name in OUTPUTS)

    def loss(at: Floats) -> tuple[float, Floats]:
        scales, shifts = np.split(at, 2)
        value, slope = cross_entropy(
            rest + weight * outputs.values(scales) + evidence.per_class(shifts)[:, None], columns
        )
        value = value / n + OUTPUT_RIDGE / 2 * float(((scales - 1) ** 2).sum() + (shifts**2).sum())
        of_scales = weight * outputs.gradient(slope) / n + OUTPUT_RIDGE * (scales - 1)
        of_shifts = np.add.reduceat(slope.sum(axis=1), evidence.starts) / n + OUTPUT_RIDGE * shifts
        return value, np.concatenate([of_scales, of_shifts])

    alpha, beta = np.split(minimise(loss, np.concatenate([np.ones(tasks), np.zeros(tasks)]), 100, TOLERANCE / n), 2)
    alpha = np.maximum(alpha, LEAST_SCALE)
    return replace(rule, scales=tuple(alpha.tolist()), shifts=tuple(beta.tolist()))


class TaskOutputs:
    """What each task says of its classes (C, n), with its logits multiplied by a scale per task.

    Log-probabilities of heads with `ood`, otherwise the logits themselves. A loop over tasks, or `reduceat` over
    classes, would take most of the time of a fit. So the classes of a task are cut into pieces of the mean number of
    classes, the last one padded: a large task does not pad the small ones.
    """

    def __init__(self, evidence: Evidence) -> None:
        counts = np.array(evidence.counts)
        size = max(1, round(float(counts.mean())))
        pieces = -(-counts // size)  # per task
        self._evidence, self._ood = evidence, np.ascontiguousarray(evidence.ood_logits.T)  # (T, n)
        self._first = np.cumsum(pieces) - pieces  # piece of each task
        self._owner = np.repeat(np.arange(len(counts)), pieces)  # task of each piece
        self._task = np.repeat(np.arange(len(counts)), counts)  # of each class
        place = np.arange(len(self._task)) - np.repeat(evidence.starts, counts)  # of a class in its task
        self._places = place % size, self._first[self._task] + place // size  # in the padded array
        self._logits = np.ascontiguousarray(evidence.class_logits.T)
        shape = (size, len(self._owner), len(evidence.class_logits))
        self._padded = np.zeros(shape)  # (classes of a piece, pieces, n)
        self._padded[self._places] = self._logits
        self._absent = np.ones(shape[:2], bool)
        self._absent[self._places] = False
        self._mean = np.zeros_like(self._ood)  # of a task's logits, under their probabilities

    def values(self, scales: Floats) -> Floats:
        if not self._evidence.has_ood:
            return self._logits * self._evidence.per_class(scales)[:, None]
        logits, ood = self._padded * scales[self._owner][:, None], self._ood * scales[:, None]
        logits[self._absent] = -np.inf
        top = np.maximum(np.maximum.reduceat(logits.max(axis=0), self._first, axis=0), ood)
        logits -= top[self._owner]
        share, ood_share = np.exp(logits), np.exp(ood - top)
        total = self._per_task(share) + ood_share
        share *= self._padded
        self._mean = (self._per_task(share) + ood_share * self._ood) / total
        logits -= np.log(total)[self._owner]
        out: Floats = logits[self._places]
        return out

    def _per_task(self, values: Floats) -> Floats:
        """Sums over the classes of each task: (T, n)."""
        out: Floats = np.add.reduceat(values.sum(axis=0), self._first, axis=0)
        return out

    def gradient(self, slope: Floats) -> Floats:
        """Of a function with this slope (C, n) over the last values, over the scales: (T,)."""
        own = np.einsum("cn,cn->c", slope, self._logits)
        if self._evidence.has_ood:
            own -= np.einsum("cn,cn->c", slope, self._mean[self._task])
        out: Floats = np.add.reduceat(own, self._evidence.starts)
        return out


def cross_entropy(scores: Floats, columns: NDArray[np.int64]) -> tuple[float, Floats]:
    """The sum over images of the cross-entropy with their classes, and its slope over the scores (C, n)."""
    own = (columns, np.arange(len(columns)))
    shifted = scores - scores.max(axis=0)
    right = shifted[own]
    slope = np.exp(shifted, out=shifted)
    total = slope.sum(axis=0)
    slope /= total
    slope[own] -= 1
    return float((np.log(total) - right).sum()), slope


def minimise(loss: Callable[[Floats], tuple[float, Floats]], start: Floats, steps: int, tolerance: float) -> Floats:
    """L-BFGS, from a function that gives value and gradient, until no part of the gradient is above the tolerance."""
    at = torch.from_numpy(start.copy())
    optimiser = torch.optim.LBFGS([at], max_iter=steps, tolerance_grad=tolerance, line_search_fn="strong_wolfe")

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
    if evidence.ran is None or not evidence.ran.any():
        deviation = mean_deviations([terms[:, :, t] for t in range(terms.shape[2])])
    else:
        some = evidence.ran.any(axis=1)
        ran = np.repeat(evidence.ran[some], evidence.counts, axis=1)
        deviation = np.nanstd(np.where(ran[:, :, None], terms[some], np.nan), axis=1).mean(axis=0)
    return np.where(deviation > 1e-9, deviation, 1.0)


def prior_weights(left_out: FrozenScores, prior: Prior) -> dict[str, float]:
    """The prior's weights of the frozen terms, for terms as they are."""
    scale = unit_scales([left_out.term(name) for name in FROZEN_TERMS])
    return {name: prior.rule[name] / float(own) for name, own in zip(FROZEN_TERMS, scale, strict=True)}


def unit_scales(terms: Sequence[Floats]) -> Floats:
    """What terms (n, C) are divided by so that their deviation over classes is 1; 1 for those without any."""
    deviation = mean_deviations(terms)
    return np.where(deviation > 1e-9, deviation, 1.0)


def mean_deviations(terms: Sequence[Floats]) -> Floats:
    """The mean over images of the deviation over classes of each term (n, C); 0 without images."""
    return np.array([float(own.std(axis=1).mean()) if len(own) else 0.0 for own in terms])
