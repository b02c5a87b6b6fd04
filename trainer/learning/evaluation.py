"""Fit the two decisions of a new version on left-out images, measure it on them, and compare it with its parent."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.inference.cascade import Cascade, Chosen
from models.inference.evidence import Features, Floats, FrozenScores
from models.inference.model import Model
from models.inference.novelty import Novelty
from models.inference.rules import Rule
from models.network.adapted_blocks import tensors_of
from trainer.learning.advice import advise, frozen_rule
from trainer.learning.calibration import Target, fit_cascade, fit_novelty, fit_rule, paper_novelty
from trainer.learning.closed_form import NetworkGain, fit_closed_form, network_gain
from trainer.learning.gate import Verdict, auc, judge
from trainer.learning.leave_out import LeaveOut
from trainer.learning.memory import Samples, spread_over_classes
from trainer.learning.settings import LearnerSettings
from trainer.learning.simulation import left_out_scores, simulated_novelty
from trainer.learning.tokens import TokenCache


def evaluate(
    tokens: TokenCache,
    parent: Model,
    model: Model,
    samples: Samples,
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> tuple[Model, Verdict]:
    """The model with its decisions, and the gate's verdict.

    Which class is fitted on held-out images, because the networks have seen all others; if the networks do not improve
    it, the version answers in closed form. Whether novel is fitted on all kept images: it weighs frozen evidence only.
    """
    labels = choose_images(samples, settings.recipe.calibration_images, rng)
    keys, column = list(labels), {name: c for c, name in enumerate(model.classes)}
    columns = np.array([column[labels[key]] for key in keys], np.int64)
    kept = LeaveOut(model.frozen, *tokens.frozen(keys), columns)
    left_out = left_out_scores(kept, rng)
    held_out = {sample.key for sample in samples.held_out}
    left = ~np.isnan(left_out.ridge).any(axis=1)
    fitted_on = _few_of_each_class(labels, held_out, settings)
    rows = left & np.array([key in fitted_on for key in keys], bool)
    if not rows.any():  # no class has an image to spare: those that the networks have seen must do
        rows = left
    held_keys = [key for key, row in zip(keys, rows, strict=True) if row]
    scores = left_out.rows(rows)
    cascade = _cascade(tokens, model, left_out, columns, settings)
    model = replace(model, rule=Rule(cascade=cascade))
    ran = cascade.choose(scores, model.counts) if cascade else None
    # The parent's statistics hold these images too: the new ones, without the new classes, stand for them.
    before_scores = scores.first_classes(len(parent.classes))
    ran_before = parent.networks_to_run(before_scores) if parent.tasks else None
    needed = _needed(model, ran, parent, ran_before, len(held_keys))
    z = [
        tokens.features([key for key, own in zip(held_keys, runs, strict=True) if own], tensors_of(task))
        for task, runs in zip(model.tasks, needed.T, strict=True)
    ]
    features = Features(_spread(z, needed), kept.features[rows], kept.expanded[rows], ran)
    after = model.evidence(features, scores)
    target = Target(settings.accept, settings.flag)
    novelty_auc: float | None
    gain: NetworkGain | None = None
    fitted = replace(fit_rule(after, columns[rows], settings.recipe.prior), cascade=cascade)
    if not left.any():  # the kept images were deleted: the parent's decision stays
        rule, novelty, novelty_auc = (
            fitted if settings.rule == "fitted" else Rule(cascade=cascade),
            parent.novelty,
            None,
        )
    elif settings.rule == "paper":
        rule = Rule(cascade=cascade)
        novelty = paper_novelty(rule, after, columns[rows], target)
        novelty_auc = auc(novelty.known, novelty.simulated)
    else:
        rule = fitted
        if settings.recipe.networks == "if they pay":
            gain = network_gain(after, rows, left_out, columns, settings.recipe.prior, rng)
            if gain is None or not gain.pays:
                rule = fit_closed_form(left_out, columns, settings.recipe.prior)
        simulations = simulated_novelty(kept, rng)
        novelty = fit_novelty(left_out, simulations, settings.recipe.prior, target)
        novelty_auc = simulated_auc(novelty, simulations) if simulations else None
    model = replace(model, rule=rule, novelty=novelty)
    names = [labels[key] for key in held_keys]
    # The paper's rule has no frozen terms, so the advice always follows the fitted rule.
    advice = advise(left_out, frozen_rule(fitted, left_out, columns), keys, columns, model.labels, model.frozen.counts)
    if not parent.tasks:
        verdict = judge(None, model, None, after, names, novelty_auc, settings)
        return model, replace(verdict, advice=advice, networks=gain)
    features = replace(features, tasks=features.tasks[: len(parent.tasks)], ran=ran_before)
    before = parent.evidence(features, before_scores)
    verdict = judge(parent, model, before, after, names, novelty_auc, settings)
    return model, replace(verdict, advice=advice, networks=gain)


def _cascade(
    tokens: TokenCache, model: Model, left_out: FrozenScores, columns: NDArray[np.int64], settings: LearnerSettings
) -> Cascade | None:
    """The cascade of the new version; None if all networks run. Those of a CNN cost next to nothing."""
    most, recipe = settings.networks_per_image, settings.recipe
    if most is None or tokens.backbone.one_token:
        return None
    return fit_cascade(left_out, columns, model.counts, recipe.prior, most, recipe.cascade_share)


def _needed(model: Model, ran: Chosen | None, parent: Model, ran_before: Chosen | None, images: int) -> Chosen:
    """The networks that run for an image under the new version or under its parent: (n, T)."""
    everything = np.ones((images, len(model.tasks)), bool)
    out = everything if ran is None else ran.copy()
    old = out[:, : len(parent.tasks)]
    old |= True if ran_before is None else ran_before
    return out


def _spread(features: Sequence[NDArray[np.float32]], ran: Chosen) -> NDArray[np.float32]:
    """From the features of the images that ran, per task, to (T, n, d) with 0 elsewhere."""
    out = np.zeros((*ran.T.shape, features[0].shape[1]), np.float32)
    for own, rows, values in zip(out, ran.T, features, strict=True):
        own[rows] = values
    return out


def _few_of_each_class(labels: Mapping[str, str], held_out: Container[str], settings: LearnerSettings) -> set[str]:
    by_class: dict[str, list[str]] = {}
    for key, name in labels.items():
        if key in held_out:
            by_class.setdefault(name, []).append(key)
    chosen = spread_over_classes(by_class, settings.recipe.network_images)
    return {key for keys in chosen.values() for key in keys}


def choose_images(samples: Samples, most: int, rng: np.random.Generator) -> dict[str, str]:
    """Kept images, key -> class: at most `most`, the same number of each class, held-out ones first."""
    by_class: dict[str, list[str]] = {name: [] for name in samples.memory}
    for sample in samples.held_out:
        by_class.setdefault(sample.label, []).append(sample.key)
    for name, keys in samples.memory.items():
        by_class[name] += [keys[i] for i in rng.permutation(len(keys)) if keys[i] not in by_class[name]]
    quota = max(1, most // max(len(by_class), 1))
    return {key: name for name, keys in by_class.items() for key in keys[:quota]}


def simulated_auc(novelty: Novelty, simulations: Sequence[tuple[Floats, Floats]]) -> float | None:
    """Known against novel images of all simulations."""
    known, novel = ([side @ novelty.weights[:-1] for side in sides] for sides in zip(*simulations, strict=True))
    return auc(np.concatenate(known), np.concatenate(novel))
