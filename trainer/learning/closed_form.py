"""The class decision without networks, in closed form or with the refined feature, and whether training paid.

A network that saw tens of images per class may know no more than the frozen feature that it starts from. Its evidence
then adds noise only, and a version that answers in closed form is better and costs less per image. For the same reason
a rule with a refined feature weighs no network: beside it, the networks of a CNN's tasks know nothing more.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array, Evidence, Floats, FrozenScores, log_softmax
from models.inference.rules import FROZEN_TERMS, REFINED_TERMS, Rule, term
from trainer.learning.advice import frozen_rule
from trainer.learning.prior import Prior
from trainer.learning.rule_fit import fit_rule, prior_weights, unit_scales

NAME = "closed form"
REFINED_NAME = "refined feature"
FOLDS = 2  # every fold costs another fit of the rule
CLEARLY = 2.0  # standard errors
NEWTON_STEPS = 20
TOLERANCE = 1e-4  # of a weight, for evidence with a deviation of 1


@dataclass(frozen=True)
class NetworkGain:
    """The mean cross-entropy of both rules on held-out images, each image under weights that were fitted without it."""

    closed_form: float
    networks: float  # of all tasks, or of the refined feature where there is one
    error: float  # the standard error of the difference

    def pays(self, pooled_only: bool) -> bool:
        """Whether what was trained counts.

        Those that see nothing but a CNN's pooled feature must be better. To ask for more, a whole error, would lose
        accuracy: errors are as large. A transformer's with all blocks adapted, and a CNN's refined feature, improved on
        the closed form wherever that was measured, more than a few held-out images can show: they must not be clearly
        worse.
        """
        return self.networks < self.closed_form + (0.0 if pooled_only else CLEARLY * self.error)


def fit_closed_form(left_out: FrozenScores, columns: NDArray[np.int64], prior: Prior, near: Rule | None = None) -> Rule:
    """The weights of the frozen terms with the least cross-entropy on left-out images, drawn toward the prior.

    `near`: a rule that is expected to be close, where the search starts.

    The prior says how the terms compare. Their common scale follows from the images: the prior's own is that of a rule
    which weighs the networks too.
    """
    rows = left_out.complete
    known, own = left_out.rows(rows), columns[rows]
    start = frozen_rule(Rule(NAME, prior_weights(known, prior)), left_out, columns)
    if len(own) == 0 or known.ridge.shape[1] < 2:
        return start
    terms = [known.term(name) for name in FROZEN_TERMS]
    scale = unit_scales(terms)
    centre, first = (np.array([rule.weights[name] for name in FROZEN_TERMS]) * scale for rule in (start, near or start))
    weights = _fitted(terms, scale, own, centre, first, prior.rule_strength)
    return Rule(NAME, dict(zip(FROZEN_TERMS, weights.tolist(), strict=True)))


def correct_in_closed_form(rule: Rule, scores: FrozenScores, columns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the best class by frozen evidence alone is that of each image: (n,)."""
    out: NDArray[np.bool_] = rule.frozen_scores(scores).argmax(axis=1) == columns
    return out


def fit_refined(evidence: Evidence, columns: NDArray[np.int64], prior: Prior, near: Rule | None = None) -> Rule:
    """The weights of the frozen terms and of the refined feature with the least cross-entropy on n held-out images.

    The prior's weights are for evidence with a deviation of 1 over the classes of an image.
    """
    terms = [term(evidence, name) for name in REFINED_TERMS]
    scale, centre = unit_scales(terms), np.array([prior.refined_rule[name] for name in REFINED_TERMS])
    weights = centre / scale
    if len(columns) and terms[0].shape[1] > 1:
        first = centre if near is None else np.array([near.weights[name] for name in REFINED_TERMS]) * scale
        weights = _fitted(terms, scale, columns, centre, first, prior.rule_strength)
    return Rule(REFINED_NAME, dict(zip(REFINED_TERMS, weights.tolist(), strict=True)))


def fit_trained(evidence: Evidence, columns: NDArray[np.int64], prior: Prior, near: Rule | None = None) -> Rule:
    """The rule that weighs what was trained: the refined feature if there is one, otherwise the tasks' networks."""
    fit = fit_rule if evidence.refined is None else fit_refined
    return fit(evidence, columns, prior, near)


def _fitted(
    terms: Sequence[Floats], scale: Floats, columns: NDArray[np.int64], centre: Floats, start: Floats, strength: float
) -> Floats:
    """The weights of terms (n, C) as they are; `centre` and `start` are for terms that are divided by `scale`."""
    scaled = np.stack([own / by for own, by in zip(terms, scale, strict=True)])
    # That changes no softmax, and float32 keeps more digits of the differences.
    scaled = (scaled - scaled.mean(axis=2, keepdims=True)).astype(np.float32)
    return np.maximum(_least_cross_entropy(scaled, columns, centre, start, strength), 0.0) / scale


def _least_cross_entropy(
    terms: Array, columns: NDArray[np.int64], centre: Floats, start: Floats, strength: float
) -> Floats:
    """Newton's method on a convex loss: the cross-entropy of a softmax, and a quadratic penalty around `centre`.

    `terms` are (terms, n, C).
    """
    count, n, classes = terms.shape
    flat, weighted = terms.reshape(count, -1), np.empty_like(terms)
    weights, right = start, terms[:, np.arange(n), columns].sum(axis=1, dtype=np.float64)
    for _ in range(NEWTON_STEPS):
        shares = (weights.astype(np.float32) @ flat).reshape(n, classes)
        shares -= shares.max(axis=1, keepdims=True)
        np.exp(shares, out=shares)
        shares /= shares.sum(axis=1, keepdims=True)
        np.multiply(terms, shares, out=weighted)
        expected = weighted.sum(axis=2)  # (terms, n)
        gradient = expected.sum(axis=1, dtype=np.float64) - right + strength * (weights - centre)
        hessian = weighted.reshape(count, -1) @ flat.T - expected @ expected.T + strength * np.eye(count)
        step = np.linalg.solve(hessian, gradient)
        weights = weights - step / max(1.0, float(np.abs(step).max()))  # far from the optimum a full step overshoots
        if float(np.abs(step).max()) < TOLERANCE:
            break
    return weights


def network_gain(
    evidence: Evidence,
    held_out: NDArray[np.bool_],
    left_out: FrozenScores,
    columns: NDArray[np.int64],
    prior: Prior,
    closed_form: Rule,
    fitted: Rule,
    rng: np.random.Generator,
) -> NetworkGain | None:
    """Compare both rules by cross-validation over the held-out images, which no network has seen.

    None if there is one image only, or if nothing that was trained ran for any. `evidence` is theirs; `held_out` says
    which of the left-out images, of classes `columns`, they are. The closed form is fitted on all left-out images of
    the other folds: it does not need images that the networks have not seen. `closed_form` and `fitted` are the rules
    of all images.
    """
    places = np.flatnonzero(held_out)
    none_ran = evidence.refined is None and evidence.ran is not None and not evidence.ran.any()
    if len(places) < FOLDS or none_ran:
        return None
    fold = np.full(len(columns), -1)
    fold[places] = rng.permutation(np.arange(len(places)) % FOLDS)
    losses = np.zeros((2, len(places)))

    def score(k: int) -> None:
        """Fill in the losses of one fold."""
        inside, own = fold[places] == k, fold == k
        rules = (
            fit_closed_form(left_out.rows(~own), columns[~own], prior, closed_form),
            fit_trained(evidence.rows(~inside), columns[places[~inside]], prior, fitted),
        )
        for row, rule in zip(losses, rules, strict=True):
            shares = log_softmax(rule.log_scores(evidence.rows(inside)))
            row[inside] = -shares[np.arange(int(inside.sum())), columns[places[inside]]]

    with ThreadPoolExecutor(FOLDS) as pool:
        list(pool.map(score, range(FOLDS)))
    gains = losses[0] - losses[1]
    return NetworkGain(
        closed_form=float(losses[0].mean()),
        networks=float(losses[1].mean()),
        error=float(gains.std(ddof=1) / np.sqrt(len(gains))),
    )
