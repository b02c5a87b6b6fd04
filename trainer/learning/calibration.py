"""Calibrate a version on held-out images of known classes: the constants of its rule and its threshold."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from models.inference.calibration import Calibration
from models.inference.evidence import Evidence, Features, log_softmax
from models.inference.model import Model
from models.inference.rules import Rule
from trainer.learning.memory import HeldOut
from trainer.learning.settings import LearnerSettings

# The first value of each constant fits most measured versions best; another one must be better by MARGIN. The default
# also decides where held-out images cannot: with one task, a temperature does not change the order of its classes.
TEMPERATURES = (8.0, 4.0, 16.0, 2.0, 1.0)
FROZEN_WEIGHTS = (0.2, 0.1, 0.5, 0.05, 1.0, 0.02, 0.01)
MARGIN = 1e-3  # nats per image
CONSTANTS: dict[str, dict[str, tuple[float, ...]]] = {
    "plain": {"temperature": TEMPERATURES},
    "paper": {"temperature": TEMPERATURES},
    "product": {"temperature": TEMPERATURES, "frozen_weight": FROZEN_WEIGHTS},
}
SHARPNESS = tuple(2.0**k for k in range(-6, 5))  # the scale of a score does not change its order, so it is free


def held_out_evidence(model: Model, features: Features, held_out: Sequence[HeldOut]) -> Evidence:
    """The evidence of held-out images; that of cross-fitted ones is corrected to what their folds measured."""
    evidence = model.evidence(features)
    column = {name: c for c, name in enumerate(model.classes)}
    fitted = [row for row, sample in enumerate(held_out) if sample.trained_on and sample.label in column]
    columns = np.array([column[held_out[row].label] for row in fitted], np.int64)
    evidence.frozen[fitted] = model.frozen.distances_without(features.frozen[fitted], columns)
    for k, task in enumerate(model.tasks):
        own = [row for row in fitted if held_out[row].label in task.classes]
        labels = np.array([task.classes.index(held_out[row].label) for row in own], np.int64)
        distances = task.gaussians.distances_without(features.tasks[k][own], labels)
        for row, distance in zip(own, distances, strict=True):
            evidence.distances[k][row] = distance * held_out[row].distance_ratio
            evidence.logits[k][row] += held_out[row].logit_shift
    return evidence


def calibrate(
    model: Model, parent: Model, evidence: Evidence, labels: Sequence[str], settings: LearnerSettings
) -> Model:
    """Fit the rule and the threshold on the evidence (n images) of held-out images with these labels.

    A task whose held-out images were all deleted keeps the parent's statistics of its distances.
    """
    column = {name: c for c, name in enumerate(model.classes)}
    rule = fit_rule(settings.rule, evidence, np.array([column[label] for label in labels]))
    nearest: list[NDArray[np.float64]] = [
        evidence.distances[k][np.array([label in task.classes for label in labels])].min(axis=1)
        for k, task in enumerate(model.tasks)
    ]
    deleted = [k for k, distances in enumerate(nearest) if len(distances) == 0]
    nearest = [distances if len(distances) else np.ones(1) for distances in nearest]
    calibration = Calibration.fit(rule.log_scores(evidence).max(axis=1), nearest, settings.accept)
    calibration.tails[deleted] = parent.calibration.tails[deleted]
    return replace(model, rule=rule, calibration=calibration)


def fit_rule(name: str, evidence: Evidence, columns: NDArray[np.int64]) -> Rule:
    """The rule with the best constants; `columns` are the true classes as columns of its scores."""
    grid = CONSTANTS.get(name, {})
    rules = [Rule(name, dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
    losses = [_loss(rule.log_scores(evidence), columns) for rule in rules]
    return next(rule for rule, loss in zip(rules, losses, strict=True) if loss <= min(losses) + MARGIN)


def _loss(log_scores: NDArray[np.float64], columns: NDArray[np.int64]) -> float:
    """Cross-entropy of the true class at the best sharpness. Accuracy on tens of images is too coarse."""
    true = np.arange(len(columns)), columns
    return min(float(-log_softmax(sharpness * log_scores)[true].mean()) for sharpness in SHARPNESS)
