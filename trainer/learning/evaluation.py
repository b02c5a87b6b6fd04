"""Fit the two decisions of a new version on left-out images, measure it on them, and compare it with its parent."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from models.inference.evidence import Features, Floats
from models.inference.model import Model
from models.inference.novelty import Novelty
from models.inference.rules import Rule
from models.network.adapted_blocks import tensors_of
from trainer.learning.advice import advise, frozen_rule
from trainer.learning.calibration import Target, fit_novelty, fit_rule, paper_novelty
from trainer.learning.gate import Verdict, auc, judge
from trainer.learning.leave_out import LeaveOut
from trainer.learning.memory import Samples
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

    Which class is fitted on held-out images, because the networks have seen all others. Whether novel is fitted on all
    kept images, because it weighs frozen evidence only.
    """
    labels = _chosen(samples, settings.recipe.calibration_images, rng)
    keys, column = list(labels), {name: c for c, name in enumerate(model.classes)}
    columns = np.array([column[labels[key]] for key in keys], np.int64)
    kept = LeaveOut(model.frozen, *tokens.frozen(keys), columns)
    left_out = left_out_scores(kept, rng)
    held_out = {sample.key for sample in samples.held_out}
    left = ~np.isnan(left_out.ridge).any(axis=1)
    rows = left & np.array([key in held_out for key in keys], bool)
    if not rows.any():  # no class has an image to spare: those that the networks have seen must do
        rows = left
    held_keys = [key for key, row in zip(keys, rows, strict=True) if row]
    features = Features(
        [tokens.features(held_keys, tensors_of(task)) for task in model.tasks], kept.features[rows], kept.expanded[rows]
    )
    after = replace(model.evidence(features), frozen=left_out.rows(rows))
    target = Target(settings.accept, settings.flag)
    novelty_auc: float | None
    fitted = fit_rule(after, columns[rows], settings.recipe.prior)
    if not left.any():  # the kept images were deleted: the parent's decision stays
        rule, novelty, novelty_auc = fitted if settings.rule == "fitted" else Rule(), parent.novelty, None
    elif settings.rule == "paper":
        rule = Rule()
        novelty = paper_novelty(rule, after, columns[rows], target)
        novelty_auc = auc(novelty.known, novelty.simulated)
    else:
        rule = fitted
        simulations = simulated_novelty(kept, rng)
        novelty = fit_novelty(left_out, simulations, settings.recipe.prior, target)
        novelty_auc = _auc(novelty, simulations) if simulations else None
    model = replace(model, rule=rule, novelty=novelty)
    names = [labels[key] for key in held_keys]
    # The paper's rule has no frozen terms, so the advice always follows the fitted rule.
    advice = advise(left_out, frozen_rule(fitted, left_out, columns), keys, columns, model.labels, model.frozen.counts)
    if not parent.tasks:
        verdict = judge(None, model, None, after, names, novelty_auc, settings)
        return model, replace(verdict, advice=advice)
    before = parent.evidence(replace(features, tasks=features.tasks[: len(parent.tasks)]))
    # The parent's statistics hold these images too: the new ones, without the new classes, stand for them.
    before = replace(before, frozen=after.frozen.first_classes(len(parent.classes)))
    verdict = judge(parent, model, before, after, names, novelty_auc, settings)
    return model, replace(verdict, advice=advice)


def _chosen(samples: Samples, most: int, rng: np.random.Generator) -> dict[str, str]:
    """Kept images, key -> class: at most `most`, the same number of each class, held-out ones first."""
    by_class: dict[str, list[str]] = {name: [] for name in samples.memory}
    for sample in samples.held_out:
        by_class.setdefault(sample.label, []).append(sample.key)
    for name, keys in samples.memory.items():
        by_class[name] += [keys[i] for i in rng.permutation(len(keys)) if keys[i] not in by_class[name]]
    quota = max(1, most // max(len(by_class), 1))
    return {key: name for name, keys in by_class.items() for key in keys[:quota]}


def _auc(novelty: Novelty, simulations: Sequence[tuple[Floats, Floats]]) -> float | None:
    """Known against novel images of all simulations."""
    known, novel = ([side @ novelty.weights[:-1] for side in sides] for sides in zip(*simulations, strict=True))
    return auc(np.concatenate(known), np.concatenate(novel))
