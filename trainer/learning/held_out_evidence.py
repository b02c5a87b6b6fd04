"""The evidence of held-out images under a new version and under its parent.

Training sees all other images, so the class decision is fitted on these, and the gate compares both versions on them.
Their frozen scores are left-out ones, and so are their scores under a refined feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.inference.cascade import Cascade, Chosen
from models.inference.evidence import Evidence, Features, FrozenScores
from models.inference.model import Model
from models.inference.rules import REFINED, Rule, without_networks
from models.network.adapted_blocks import tensors_of
from trainer.learning.cascade_fit import fit_cascade
from trainer.learning.forward_passes import turned_view
from trainer.learning.left_out_evidence import LeftOutEvidence
from trainer.learning.memory import Samples, spread_over_classes
from trainer.learning.methods import method_of
from trainer.learning.refined_statistics import left_out_refined
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


@dataclass(frozen=True)
class HeldOutEvidence:
    """Of h images, some of the n left-out ones."""

    rows: NDArray[np.bool_]  # (n,), which of the left-out images they are
    seen: bool  # by training: no class has an image to spare
    labels: list[str]  # (h,), their classes
    columns: NDArray[np.int64]  # (h,), and the columns of these in the scores
    model: Model  # the new version, without a refined feature if it has seen these images
    parent: Model  # with a rule that weighs what is known of these images
    after: Evidence
    before: Evidence | None  # None without a parent
    cascade: Cascade | None  # of the new version
    rotations: int  # of an image that its networks see


def held_out_evidence(
    tokens: TokenCache,
    parent: Model,
    parent_samples: Samples,
    model: Model,
    samples: Samples,
    known: LeftOutEvidence,
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> HeldOutEvidence:
    """Of the held-out images among the left-out ones; the two models keep `samples` and `parent_samples`."""
    left_out, columns = known.scores, known.kept.columns
    rows = _held_out_rows(known, samples, settings)
    seen = not rows.any()
    if seen:  # those that the networks have seen must do
        rows, model = left_out.complete, replace(model, refined=None)  # the refined feature has seen too much of them
    keys = _chosen(list(known.labels), rows)
    scores = left_out.rows(rows)
    cascade = _cascade(tokens, model, left_out, columns, settings)
    rotations = settings.rotations if method_of(settings).rotates and not settings.draws else 1
    # Until the rule is fitted, one that weighs the same evidence.
    weighs_refined = Rule(weights=settings.recipe.prior.refined_rule)
    model = replace(model, rule=Rule(cascade=cascade) if model.refined is None else weighs_refined)
    ran = cascade.choose(scores, model.counts) if cascade else None
    # The parent's statistics hold these images too: the new ones, without the new classes, stand for them.
    before_scores = scores.first_classes(len(parent.classes))
    ran_before = parent.networks_to_run(before_scores) if parent.tasks else None
    before: Evidence | None = None
    if ran is None and ran_before is None and rotations == parent.rule.rotations == 1:
        after = _evidence(tokens, model, keys, scores)
        if parent.tasks:
            before = _evidence(tokens, parent, keys, before_scores)
    else:
        needed = _needed(model, ran, parent, ran_before, len(keys))
        upright, *turned = (
            _task_features(tokens, model, keys, needed, turned_view(0, turns)) for turns in range(rotations)
        )
        frozen = known.kept.features[rows], known.kept.expanded[rows]
        features = Features(upright, *frozen, ran, np.stack(turned) if turned else None)
        after = model.evidence(features, scores)
        if parent.tasks:
            before = parent.evidence(_of_parent(features, parent, ran_before), before_scores)
    after = replace(after, refined=left_out_refined(tokens, model, samples, keys, settings, rng))
    if before is not None and parent.uses_refined:
        refined = None
        if after.refined is not None:  # else the images behind the parent's may be gone too
            refined = left_out_refined(tokens, parent, parent_samples, keys, settings, rng)
        if refined is None:  # the parent is compared without it
            weights = {name: weight for name, weight in parent.rule.weights.items() if name != REFINED}
            parent = replace(parent, rule=replace(parent.rule, weights=weights))
        before = replace(before, refined=refined)
    labels = [known.labels[key] for key in keys]
    return HeldOutEvidence(rows, seen, labels, columns[rows], model, parent, after, before, cascade, rotations)


def _held_out_rows(known: LeftOutEvidence, samples: Samples, settings: LearnerSettings) -> NDArray[np.bool_]:
    """Few of each class: every network may run for each of them."""
    held_out = {sample.key for sample in samples.held_out}
    by_class: dict[str, list[str]] = {}
    for key, name in known.labels.items():
        if key in held_out:
            by_class.setdefault(name, []).append(key)
    few = spread_over_classes(by_class, settings.recipe.network_images)
    chosen = {key for keys in few.values() for key in keys}
    return np.asarray(known.scores.complete & np.array([key in chosen for key in known.labels], bool))


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
