"""A provisional model: the tasks that are learned, and pending ones whose classes are known in closed form only.

The frozen statistics of a class follow from its images at once, so a new class can answer before a network is trained.
In a provisional version all classes are compared by the same evidence, the frozen one: the rule has the prior's
weights for it, and none for the networks. The novelty decision is fitted as that of a learned version without a refined
feature, on the same images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import FrozenScores
from models.inference.factors import TaskSums
from models.inference.frozen import FrozenStatistics
from models.inference.model import Model
from models.inference.rules import Rule
from models.inference.stored_model import ClosedForm
from tasks.errors import BatchError
from trainer.learning.advice import frozen_rule
from trainer.learning.closed_form import correct_in_closed_form
from trainer.learning.division import divide
from trainer.learning.draws import check_summed_batch, with_draws
from trainer.learning.evaluation import simulated_auc
from trainer.learning.left_out_evidence import left_out_evidence
from trainer.learning.memory import Samples, corrections, unseen
from trainer.learning.novelty_fit import Target, fit_novelty
from trainer.learning.rule_fit import prior_weights
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

Images = Mapping[str, Sequence[str]]  # class -> image keys


@dataclass(frozen=True)
class ProvisionalModel:
    model: Model  # with the pending tasks
    closed_form: ClosedForm  # what they add
    samples: Samples  # of the learned tasks, and the pending images
    accuracy: float | None  # over all classes, on left-out images
    novelty_auc: float | None
    drawn: int  # of the images behind these figures, draws from class statistics
    reasons: tuple[str, ...]  # why it should not answer; empty if it may


def provisional_model(
    tokens: TokenCache, learned: Model, samples: Samples, pending: Mapping[str, Images], settings: LearnerSettings
) -> ProvisionalModel:
    """Add the images of pending tasks, by task, to a learned model, in their order.

    BatchError if a task adds nothing, or if there is no image to calibrate on.
    """
    added = _Added(learned.frozen, list(learned.classes))
    pending_classes, after = [], samples
    if settings.draws:
        after = with_draws(tokens, learned, samples, (), settings)
    for images in pending.values():
        corrected = corrections(images, after)
        after = after.without(corrected)
        fresh = unseen(images, after)
        if settings.draws:
            check_summed_batch(fresh, corrected, after)
        added.change(tokens, corrected, -1)
        if new := tuple(name for name in fresh if name not in added.classes):
            pending_classes.append(new)
        added.change(tokens, {key: name for name, keys in fresh.items() for key in keys}, 1, new)
        after = divide(tokens, after, fresh, settings).kept
    model = replace(learned, frozen=added.frozen, pending=tuple(pending_classes), rule=Rule("provisional", {}))
    model = replace(model, refined=None)  # it has no statistics of the pending classes
    left = left_out_evidence(tokens, model, after, settings, again=True)
    left_out, columns, simulations = left.scores, left.kept.columns, left.simulations
    rows = left_out.complete
    if not rows.any():
        raise BatchError(["no class has two images: add images, to calibrate on"])
    prior = settings.recipe.prior
    rule = frozen_rule(Rule("provisional", prior_weights(left_out.rows(rows), prior)), left_out, columns)
    target = Target(settings.accept, settings.flag)
    novelty = fit_novelty(left_out, simulations, prior, target, left.kept.weights, left.drawn)
    correct = correct_in_closed_form(rule, left_out.rows(rows), columns[rows])
    return ProvisionalModel(
        replace(model, rule=rule, novelty=novelty),
        added.closed_form(learned.frozen),
        replace(samples, pending={task: _as_tuples(images) for task, images in pending.items()}),
        accuracy=float(np.average(correct, weights=left.kept.weights[rows])),
        novelty_auc=simulated_auc(novelty, simulations) if simulations else None,
        drawn=int(left.drawn.sum()),
        reasons=_reasons(rule, left_out.rows(rows), columns[rows], len(learned.classes), settings),
    )


@dataclass
class _Added:
    """Frozen statistics to which images are added, and what was added."""

    frozen: FrozenStatistics
    classes: list[str]
    sums: TaskSums | None = None

    def change(self, tokens: TokenCache, images: Mapping[str, str], sign: int, new: Sequence[str] = ()) -> None:
        """Add (1) or remove (-1) images, key -> class."""
        self.classes += new
        if not images:
            return
        features, expanded = tokens.frozen(list(images))
        labels = np.array([self.classes.index(name) for name in images.values()], np.int64)
        before = self.frozen.with_classes(len(new))
        rows, _ = before.scatter_rows(features, labels, sign)
        if sign > 0:
            self.frozen = self.frozen.with_images(features, expanded, labels, len(new))
        else:
            self.frozen = self.frozen.without_images(features, expanded, labels)
        sums = self.sums or TaskSums.empty(features.shape[1], expanded.shape[1])
        self.sums = sums.changed(rows, np.asarray(expanded, np.float64), sign)

    def closed_form(self, before: FrozenStatistics) -> ClosedForm:
        known = len(before.counts)
        # Also where one image came and another went.
        changed = [c for c in range(known) if not np.array_equal(before.means[c], self.frozen.means[c])]
        classes = np.array([*changed, *range(known, len(self.classes))], np.int64)
        after = self.frozen
        sums = self.sums or TaskSums.empty(len(after.scatter), len(after.gram))
        return ClosedForm(sums, classes, after.counts[classes], after.means[classes], after.moments[classes])


def _reasons(
    rule: Rule, scores: FrozenScores, columns: NDArray[np.int64], known: int, settings: LearnerSettings
) -> tuple[str, ...]:
    """The gate of a provisional version: the new classes must not take too many images of the known ones."""
    old = columns < known
    if not old.any():
        return ()
    before = float(correct_in_closed_form(rule, scores.rows(old).first_classes(known), columns[old]).mean())
    after = float(correct_in_closed_form(rule, scores.rows(old), columns[old]).mean())
    if before - after <= settings.gate_accuracy:
        return ()
    return (f"the accuracy of known classes would fall from {before:.3f} to {after:.3f}",)


def _as_tuples(images: Images) -> dict[str, tuple[str, ...]]:
    return {name: tuple(keys) for name, keys in images.items()}
