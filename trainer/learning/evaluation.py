"""Fit the two decisions of a new version on left-out images, measure it on them, and compare it with its parent."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from models.inference.evidence import Floats
from models.inference.model import Model
from models.inference.novelty import FROZEN_SUMMARIES, Novelty
from models.inference.rules import PAPER, PAPER_WITHOUT_OOD, Rule
from trainer.learning.advice import advise, frozen_rule
from trainer.learning.closed_form import (
    NetworkGain,
    correct_in_closed_form,
    fit_closed_form,
    fit_trained,
    network_gain,
)
from trainer.learning.gate import Verdict, auc, expected_accuracy, is_correct, judge
from trainer.learning.held_out_evidence import HeldOutEvidence, held_out_evidence
from trainer.learning.left_out_evidence import LeftOutEvidence, left_out_evidence
from trainer.learning.memory import Samples
from trainer.learning.novelty_fit import Target, fit_novelty, paper_novelty, with_refined
from trainer.learning.rule_fit import fit_outputs
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


class ClassDecision(NamedTuple):
    """The rule of a version, and what it was chosen from."""

    rule: Rule
    trained: Rule  # that weighs what was trained
    closed_form: Rule | None  # None with the paper's rule, or without left-out images
    gain: NetworkGain | None = None  # of the trained over the closed form; None if they were not compared


def evaluate(
    tokens: TokenCache,
    parent: Model,
    parent_samples: Samples,
    model: Model,
    samples: Samples,
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> tuple[Model, Verdict]:
    """The model with its decisions, and the gate's verdict; the two models keep `samples` and `parent_samples`."""
    known = left_out_evidence(tokens, model, samples, settings)
    held = held_out_evidence(tokens, parent, parent_samples, model, samples, known, settings, rng)
    decision = _which_class(known, held, settings, tokens.backbone.one_token, rng)
    novelty, novelty_auc = _whether_novel(known, held, decision.rule, settings)
    model = replace(held.model, rule=decision.rule, novelty=novelty)
    # Advice weighs frozen terms only: those of the closed form or, as the paper's rule has none, of the trained rule.
    columns, weights = known.kept.columns, known.kept.weights
    advisor = frozen_rule(decision.closed_form or decision.trained, known.scores, columns)
    advice = advise(known.scores, advisor, list(known.labels), columns, model.labels, model.frozen.counts, weights)
    before = held.parent if held.parent.tasks else None
    verdict = judge(before, model, held.before, held.after, held.labels, novelty_auc, settings)
    return model, replace(
        verdict,
        accuracy=_accuracy(known, held, model, decision.closed_form),
        advice=advice,
        networks=decision.gain,
        drawn=int(known.drawn.sum()),
    )


def _which_class(
    known: LeftOutEvidence, held: HeldOutEvidence, settings: LearnerSettings, one_token: bool, rng: np.random.Generator
) -> ClassDecision:
    """Fitted on held-out images, because training has seen all others.

    It weighs the refined feature or, if there is none, the tasks' networks. If they do not pay, the version answers in
    closed form.
    """
    prior = settings.recipe.prior
    trained = replace(fit_trained(held.after, held.columns, prior), cascade=held.cascade, rotations=held.rotations)
    if settings.rule != "fitted":
        weights = PAPER if held.after.has_ood else PAPER_WITHOUT_OOD
        rule = Rule(weights=weights, cascade=held.cascade, rotations=held.rotations)
        if settings.rule == "paper+c":
            rule = replace(fit_outputs(rule, held.after, held.columns), name="paper+c")
        return ClassDecision(rule, trained, None)
    if not known.scores.complete.any():
        return ClassDecision(trained, trained, None)
    columns = known.kept.columns
    closed_form = fit_closed_form(known.scores, columns, prior)
    if settings.recipe.networks == "always":
        return ClassDecision(trained, trained, closed_form)
    gain: NetworkGain | None = None
    if not settings.draws:  # networks have seen the images that draws come from
        gain = network_gain(held.after, held.rows, known.scores, columns, prior, closed_form, trained, rng)
    pays = gain is not None and gain.pays(one_token and held.after.refined is None)
    return ClassDecision(trained if pays else closed_form, trained, closed_form, gain)


def _whether_novel(
    known: LeftOutEvidence, held: HeldOutEvidence, rule: Rule, settings: LearnerSettings
) -> tuple[Novelty, float | None]:
    """Fitted on all left-out images, with the AUC that is expected.

    It weighs frozen evidence, and of the refined feature what follows from that.
    """
    prior, target = settings.recipe.prior, Target(settings.accept, settings.flag)
    if not known.scores.complete.any():  # the kept images were deleted: the parent's decision stays
        return held.parent.novelty, None
    if settings.rule != "fitted":
        # Networks have seen the images that draws come from.
        drawn = known.drawn[held.rows]
        images = drawn if drawn.all() else ~drawn
        novelty = paper_novelty(rule, held.after.rows(images), held.columns[images], target)
        return novelty, auc(novelty.known, novelty.simulated)
    weights, simulations, refined = known.kept.weights, known.simulations, held.after.refined
    novelty = fit_novelty(known.scores, simulations, prior, target, weights, known.drawn)
    if refined is None or not rule.uses_refined:
        return novelty, simulated_auc(novelty, simulations) if simulations else None
    novelty = with_refined(novelty, known.scores, held.rows, refined, simulations, prior, target, weights)
    return novelty, auc(novelty.known, novelty.simulated) if simulations else None


def _accuracy(known: LeftOutEvidence, held: HeldOutEvidence, model: Model, closed_form: Rule | None) -> float | None:
    """What the version reports of itself."""
    correct, left = is_correct(model, held.after, held.labels), known.scores.complete
    weights = known.kept.weights[left]
    if len(correct) == 0:
        return None
    if closed_form is None:
        return float(np.average(correct, weights=weights[held.rows[left]]))
    in_closed_form = correct_in_closed_form(closed_form, known.scores.rows(left), known.kept.columns[left])
    if held.seen:
        return float(np.average(in_closed_form, weights=weights))
    return expected_accuracy(correct, in_closed_form, weights, held.rows[left])


def simulated_auc(novelty: Novelty, simulations: Sequence[tuple[Floats, Floats]]) -> float | None:
    """Known against novel images of all simulations."""
    weights = novelty.weights[: len(FROZEN_SUMMARIES)]
    known, novel = ([side @ weights for side in sides] for sides in zip(*simulations, strict=True))
    return auc(np.concatenate(known), np.concatenate(novel))
