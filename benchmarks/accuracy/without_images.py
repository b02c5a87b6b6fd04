"""The methods that keep no image of earlier tasks, on a stream: what each training gives, and what it keeps.

One training gives several methods: CSI's heads are measured with four rotations and with one, with the paper's rule,
with calibrated outputs (+c), and with the rule that the product fits, which also weighs frozen evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy import odin
from benchmarks.accuracy.metrics import Floats, Step
from models.inference.evidence import Evidence, Features
from models.inference.model import Model
from models.inference.rotations import ROTATIONS
from models.inference.rules import PAPER_WITHOUT_OOD, Rule
from models.inference.stored_model import model_tensors
from models.network.adapted_blocks import tensors_of
from trainer.learning.forward_passes import turned_view
from trainer.learning.memory import Samples
from trainer.learning.rule_fit import fit_outputs
from trainer.learning.settings import LearnerSettings, Recipe
from trainer.learning.tokens import TokenCache

ABOUT = {
    "hat": "HAT alone: no replay, no back-update, concatenated logits",
    "hat-odin": "HAT with ODIN's temperature and perturbation",
    "hat-csi": "HAT+CSI: four rotations, argmax over the concatenated logits",
    "hat-csi-one": "HAT+CSI answered with the upright image alone (`rotations = 1`)",
    "hat-csi-c": "HAT+CSI+c: alpha_k, beta_k fitted on held-out images of all tasks",
    "hat-csi-c-draws": "HAT+CSI+c: alpha_k, beta_k fitted on draws from class Gaussians, without any image",
    "hat-csi-product": "the product with `OPENWORLD_TRAIN_METHOD=hat-csi`: its rule weighs frozen evidence as well",
    "hat-csi-statistics": "hat-csi-product with `OPENWORLD_TRAIN_KEEP=statistics`: fitted on draws",
    "sup": "SupSup alone: concatenated logits",
    "sup-odin": "SupSup with ODIN's temperature and perturbation",
    "sup-csi": "Sup+CSI, as hat-csi",
    "sup-csi-one": "as hat-csi-one",
    "sup-csi-c": "as hat-csi-c",
    "sup-csi-c-draws": "as hat-csi-c-draws",
    "sup-csi-product": "as hat-csi-product",
}
STATISTICS = "hat-csi-statistics"
GROUPS = ("hat-ce", "sup-ce", "hat-csi", "sup-csi", STATISTICS)
DRAWS = 20  # per class
PAPER_RULE = Rule("paper", dict(PAPER_WITHOUT_OOD), rotations=ROTATIONS)


def settings_of(group: str, seed: int, recipe: Recipe, **given: Any) -> LearnerSettings:
    """The settings of a training group; `-ce` is plain cross-entropy in the place of CSI."""
    network, objective, *keep = group.split("-")
    method = {"hat": "hat-csi", "sup": "sup-csi"}[network]
    recipe = recipe.model_copy(update={"contrastive": objective == "csi"})
    rule = "fitted" if objective == "csi" else "paper"
    return LearnerSettings(method=method, rule=rule, keep=keep[0] if keep else None, seed=seed, recipe=recipe, **given)


def task_features(tokens: TokenCache, model: Model, keys: Sequence[str], rotations: int) -> Features:
    """The features of images under every task, and of the turned images."""
    z = np.stack(
        [
            [tokens.features(keys, tensors_of(task), view=turned_view(0, turns)) for task in model.tasks]
            for turns in range(rotations)
        ]
    )
    return Features(z[0], *tokens.frozen(keys), turned=z[1:] if rotations > 1 else None)


def plain_steps(
    name: str, tokens: TokenCache, model: Model, logits: Floats, keys: Sequence[str], seconds: float
) -> dict[str, Step]:
    """Of heads without CSI: their logits, and ODIN."""
    return {
        name: _step(model, logits, seconds),
        f"{name}-odin": _step(model, odin.scores(tokens, model, keys)),
    }


def csi_steps(
    name: str, tokens: TokenCache, model: Model, samples: Samples, test: Features, drawn: Drawn | None, seconds: float
) -> dict[str, Step]:
    """Of heads with CSI, by the paper's rules."""
    paper = replace(model, rule=PAPER_RULE)
    four, one = paper.evidence(test), paper.evidence(replace(test, turned=None))
    place = {label: column for column, label in enumerate(model.classes)}
    keys = [sample.key for sample in samples.held_out]
    columns = np.array([place[sample.label] for sample in samples.held_out], np.int64)
    held_out = paper.evidence(task_features(tokens, model, keys, ROTATIONS))
    rules = {
        "": PAPER_RULE,
        "-c": fit_outputs(PAPER_RULE, held_out, columns),
    }
    if drawn is not None:
        rules["-c-draws"] = fit_outputs(PAPER_RULE, *drawn.evidence(tokens, paper))
    out = {f"{name}{suffix}": _step(model, rule.log_scores(four)) for suffix, rule in rules.items()}
    out[name] = replace(out[name], seconds=seconds)
    out[f"{name}-one"] = _step(model, PAPER_RULE.log_scores(one))
    return out


def _step(model: Model, scores: Floats, seconds: float | None = None) -> Step:
    """Its novelty score is that of the best class."""
    return Step(scores, model.task_of_class, scores.max(axis=1), seconds=seconds)


class Drawn:
    """Class Gaussians of the trunk's output in all four rotations, and draws from them, for a CNN.

    A draw is a class mean and a random combination of the deviations of the task's images: it has their covariance.
    """

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._draws: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        self._columns: list[int] = []

    def add(self, tokens: TokenCache, task: Mapping[str, Sequence[str]], rng: np.random.Generator) -> None:
        """The images of one task. They are not needed again."""

        def tokens_of(keys: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
            turned = [tokens.get(keys, [turned_view(0, turns)] * len(keys))[:, 0] for turns in range(ROTATIONS)]
            return torch.stack(turned, dim=1)[:, :, : self._dimensions].cpu().numpy()  # (n, 4, d)

        rows = {name: tokens_of(keys) for name, keys in task.items()}
        means = {name: own.mean(axis=0) for name, own in rows.items()}
        residuals = np.concatenate([own - means[name] for name, own in rows.items()])  # (n, 4, d)
        freedom = max(len(residuals) - len(rows), 1)
        for mean in means.values():
            noise = rng.standard_normal((DRAWS, len(residuals))) / np.sqrt(freedom)
            draws = mean + np.einsum("in,nrd->ird", noise, residuals)
            self._draws.append(np.maximum(draws, 0).astype(np.float32))  # pooled activations are not negative
            self._columns += [max(self._columns, default=-1) + 1] * DRAWS

    def evidence(self, tokens: TokenCache, model: Model) -> tuple[Evidence, np.ndarray[Any, np.dtype[np.int64]]]:
        """The evidence of all draws, and their classes."""
        every = torch.from_numpy(np.concatenate(self._draws))  # (m, 4, d)
        with torch.inference_mode():
            z = np.stack(
                [
                    [tokens.backbone.blocks(every[:, turns, None], tensors_of(task)).numpy() for task in model.tasks]
                    for turns in range(ROTATIONS)
                ]
            )
        count, spec = len(every), tokens.backbone.spec.frozen
        nothing = (np.zeros((count, spec.size), np.float32), np.zeros((count, spec.expanded), np.float32))
        return model.evidence(Features(z[0], *nothing, turned=z[1:])), np.array(self._columns, np.int64)


def kept_bytes(model: Model, samples: Samples, size_of: Callable[[str], int], token_bytes: int) -> dict[str, float]:
    """What a version keeps per task, in bytes: of the network, of statistics, and of the kept images."""
    count = max(len(model.tasks), 1)
    parts = {"network": 0, "statistics": 0}
    for name, array in model_tensors(model).items():
        if name.startswith(("task.", "head.")):
            statistic = "gaussians." in name or "frozen." in name
            parts["statistics" if statistic else "network"] += array.nbytes
    kept = samples.keys
    images = {"images": sum(map(size_of, kept)), "features": len(kept) * token_bytes}
    return {name: value / count for name, value in (parts | images).items()}
