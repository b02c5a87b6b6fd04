"""Fit the two decisions of a new version on left-out images, measure it on them, and compare it with its parent."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.inference.cascade import Cascade, Chosen
from models.inference.evidence import Evidence, Features, Floats, FrozenScores
from models.inference.model import Model
from models.inference.novelty import FROZEN_SUMMARIES, Novelty
from models.inference.rules import PAPER, PAPER_WITHOUT_OOD, REFINED, Rule, without_networks
from models.network.adapted_blocks import tensors_of
from trainer.learning.advice import advise, frozen_rule
from trainer.learning.cascade_fit import fit_cascade
from trainer.learning.closed_form import (
    NetworkGain,
    correct_in_closed_form,
    fit_closed_form,
    fit_trained,
    network_gain,
)
from trainer.learning.forward_passes import turned_view
from trainer.learning.gate import Verdict, auc, expected_accuracy, is_correct, judge
from trainer.learning.left_out_evidence import left_out_evidence
from trainer.learning.memory import Samples, spread_over_classes
from trainer.learning.methods import method_of
from trainer.learning.novelty_fit import Target, fit_novelty, paper_novelty, with_refined
from trainer.learning.refined_statistics import left_out_refined
from trainer.learning.rule_fit import fit_outputs
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


def evaluate(
    tokens: TokenCache,
    parent: Model,
    parent_samples: Samples,
    model: Model,
    samples: Samples,
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> tuple[Model, Verdict]:
    """The model with its decisions, and the gate's verdict; the two models keep `samples` and `parent_samples`.

    Which class is fitted on held-out images, because training has seen all others: it weighs the refined feature or, if
    there is none, the tasks' networks. If they do not pay, the version answers in closed form. Whether novel is fitted
    on all kept images: it weighs frozen evidence, and of the refined feature what follows from that.
    """
    known = left_out_evidence(tokens, model, samples, settings)
    labels, kept, left_out = known.labels, known.kept, known.scores
    keys, columns = list(labels), kept.columns
    prior, held_out = settings.recipe.prior, {sample.key for sample in samples.held_out}
    left = ~np.isnan(left_out.ridge).any(axis=1)
    fitted_on = _few_of_each_class(labels, held_out, settings)
    rows = left & np.array([key in fitted_on for key in keys], bool)
    if not rows.any():  # no class has an image to spare: those that the networks have seen must do
        rows, model = left, replace(model, refined=None)  # the refined feature has seen too much of them
    held_keys = _chosen(keys, rows)
    scores = left_out.rows(rows)
    cascade = _cascade(tokens, model, left_out, columns, settings)
    rotations = settings.rotations if method_of(settings).rotates and not settings.draws else 1
    # Until the rule is fitted, one that weighs the same evidence.
    model = replace(model, rule=Rule(cascade=cascade) if model.refined is None else Rule(weights=prior.refined_rule))
    ran = cascade.choose(scores, model.counts) if cascade else None
    # The parent's statistics hold these images too: the new ones, without the new classes, stand for them.
    before_scores = scores.first_classes(len(parent.classes))
    ran_before = parent.networks_to_run(before_scores) if parent.tasks else None
    if ran is None and ran_before is None and rotations == parent.rule.rotations == 1:
        after = _evidence(tokens, model, held_keys, scores)
        before = _evidence(tokens, parent, held_keys, before_scores) if parent.tasks else None
    else:
        needed = _needed(model, ran, parent, ran_before, len(held_keys))
        upright, *turned = (
            _task_features(tokens, model, held_keys, needed, turned_view(0, turns)) for turns in range(rotations)
        )
        frozen = kept.features[rows], kept.expanded[rows]
        features = Features(upright, *frozen, ran, np.stack(turned) if turned else None)
        after = model.evidence(features, scores)
        before = parent.evidence(_of_parent(features, parent, ran_before), before_scores) if parent.tasks else None
    after = replace(after, refined=left_out_refined(tokens, model, samples, held_keys, settings, rng))
    if before is not None and parent.uses_refined:
        refined = None
        if after.refined is not None:  # else the images behind the parent's may be gone too
            refined = left_out_refined(tokens, parent, parent_samples, held_keys, settings, rng)
        if refined is None:  # the parent is compared without it
            weights = {name: weight for name, weight in parent.rule.weights.items() if name != REFINED}
            parent = replace(parent, rule=replace(parent.rule, weights=weights))
        before = replace(before, refined=refined)
    target = Target(settings.accept, settings.flag)
    novelty_auc: float | None
    gain: NetworkGain | None = None
    closed_form: Rule | None = None
    fitted = replace(fit_trained(after, columns[rows], prior), cascade=cascade, rotations=rotations)
    rule = fitted
    if settings.rule != "fitted":
        weights = PAPER if after.has_ood else PAPER_WITHOUT_OOD
        rule = Rule(weights=weights, cascade=cascade, rotations=rotations)
        if settings.rule == "paper+c":
            rule = replace(fit_outputs(rule, after, columns[rows]), name="paper+c")
    if not left.any():  # the kept images were deleted: the parent's decision stays
        novelty, novelty_auc = parent.novelty, None
    elif settings.rule != "fitted":
        # Networks have seen the images that draws come from.
        images = ~known.drawn[rows] if not known.drawn[rows].all() else known.drawn[rows]
        novelty = paper_novelty(rule, after.rows(images), columns[rows][images], target)
        novelty_auc = auc(novelty.known, novelty.simulated)
    else:
        closed_form = fit_closed_form(left_out, columns, prior)
        if settings.recipe.networks == "if they pay":
            if not settings.draws:  # networks have seen the images that draws come from
                gain = network_gain(after, rows, left_out, columns, prior, closed_form, fitted, rng)
            if gain is None or not gain.pays(tokens.backbone.one_token and after.refined is None):
                rule = closed_form
        novelty = fit_novelty(left_out, known.simulations, prior, target, kept.weights, known.drawn)
        novelty_auc = simulated_auc(novelty, known.simulations) if known.simulations else None
        if after.refined is not None and rule.uses_refined:
            novelty = with_refined(
                novelty, left_out, rows, after.refined, known.simulations, prior, target, kept.weights
            )
            novelty_auc = auc(novelty.known, novelty.simulated) if known.simulations else None
    model = replace(model, rule=rule, novelty=novelty)
    names = [labels[key] for key in held_keys]
    # Advice weighs frozen terms only: those of the closed form or, as the paper's rule has none, of the fitted rule.
    advisor = frozen_rule(closed_form or fitted, left_out, columns)
    advice = advise(left_out, advisor, keys, columns, model.labels, model.frozen.counts, kept.weights)
    verdict = judge(parent if parent.tasks else None, model, before, after, names, novelty_auc, settings)
    return model, replace(
        verdict,
        accuracy=_accuracy(is_correct(model, after, names), closed_form, left_out, columns, kept.weights, rows),
        advice=advice,
        networks=gain,
        drawn=int(known.drawn.sum()),
    )


def _accuracy(
    correct: NDArray[np.bool_],
    closed_form: Rule | None,
    left_out: FrozenScores,
    columns: NDArray[np.int64],
    weights: Floats,
    held_out: NDArray[np.bool_],
) -> float | None:
    """What the version reports: of held-out images, compared in closed form with all left-out ones where it has one."""
    if len(correct) == 0:
        return None
    if closed_form is None:
        return float(np.average(correct, weights=weights[held_out]))
    left = np.asarray(~np.isnan(left_out.ridge).any(axis=1))
    in_closed_form = correct_in_closed_form(closed_form, left_out.rows(left), columns[left])
    return expected_accuracy(correct, in_closed_form, weights[left], held_out[left])


def _cascade(
    tokens: TokenCache, model: Model, left_out: FrozenScores, columns: NDArray[np.int64], settings: LearnerSettings
) -> Cascade | None:
    """The cascade of the new version; None if all networks run. Those of a CNN cost next to nothing."""
    most, recipe = settings.networks_per_image, settings.recipe
    if most is None or tokens.backbone.one_token:
        return None
    # The paper's rule has no frozen terms that could answer without a network.
    shares = recipe.cascade_share, recipe.sure_share if settings.weighs_frozen_evidence else 1.0
    return fit_cascade(left_out, columns, model.counts, recipe.prior, most, *shares)


def _evidence(tokens: TokenCache, model: Model, keys: Sequence[str], frozen: FrozenScores) -> Evidence:
    """Of images with these frozen scores, with the networks of all tasks if the rule weighs them."""
    if not model.rule.uses_networks:
        return without_networks(model.rule, model.counts, frozen)
    return tokens.scored.evidence(model, keys, frozen, tokens.features_of_all)


def _needed(model: Model, ran: Chosen | None, parent: Model, ran_before: Chosen | None, images: int) -> Chosen:
    """The networks that run for an image under the new version or under its parent: (n, T)."""
    everything = np.ones((images, len(model.tasks)), bool)
    out = everything if ran is None else ran.copy()
    old = out[:, : len(parent.tasks)]
    old |= True if ran_before is None else ran_before
    return out


def _of_parent(features: Features, parent: Model, ran: Chosen | None) -> Features:
    """The features of the parent's networks."""
    turned = features.turned if parent.rule.rotations > 1 else None
    return replace(
        features,
        tasks=features.tasks[: len(parent.tasks)],
        ran=ran,
        turned=None if turned is None else turned[:, : len(parent.tasks)],
    )


def _task_features(
    tokens: TokenCache, model: Model, keys: Sequence[str], needed: Chosen, view: int
) -> NDArray[np.float32]:
    """(T, n, d) under the networks that are needed, 0 elsewhere."""
    if needed.all():
        return tokens.features_of_all(keys, model.tasks, view=view)
    out = np.zeros((*needed.T.shape, tokens.backbone.spec.dimensions), np.float32)
    for own, rows, task in zip(out, needed.T, model.tasks, strict=True):
        own[rows] = tokens.features(_chosen(keys, rows), tensors_of(task), view=view)
    return out


def _chosen(keys: Sequence[str], rows: NDArray[np.bool_]) -> list[str]:
    return [key for key, row in zip(keys, rows, strict=True) if row]


def _few_of_each_class(labels: Mapping[str, str], held_out: Container[str], settings: LearnerSettings) -> set[str]:
    by_class: dict[str, list[str]] = {}
    for key, name in labels.items():
        if key in held_out:
            by_class.setdefault(name, []).append(key)
    chosen = spread_over_classes(by_class, settings.recipe.network_images)
    return {key for keys in chosen.values() for key in keys}


def simulated_auc(novelty: Novelty, simulations: Sequence[tuple[Floats, Floats]]) -> float | None:
    """Known against novel images of all simulations."""
    weights = novelty.weights[: len(FROZEN_SUMMARIES)]
    known, novel = ([side @ weights for side in sides] for sides in zip(*simulations, strict=True))
    return auc(np.concatenate(known), np.concatenate(novel))
