"""Data folders with versions of any number of tasks whose tensors are random: speed does not depend on their values.

Every task has the sizes of a real one: classes, images behind its Gaussians, active units. No image is novel, so that
the inbox takes no time. The cascade of a transformer has no margin, so every image runs as many networks as it may.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import save_file

from models.inference.cascade import Cascade
from models.inference.evidence import Array
from models.inference.factors import TaskSums
from models.inference.frozen import FrozenStatistics
from models.inference.gaussians import Gaussians
from models.inference.model import Adapters, Head, Model, SharedAdapters, TaskModel
from models.inference.novelty import SUMMARIES, Novelty
from models.inference.refined import RefinedFeature
from models.inference.rules import FROZEN_TERMS, REFINED_TERMS, TERMS, Rule
from models.inference.stored_model import model_tensors
from models.network.backbone import Backbone, open_backbone
from models.network.export import export
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from trainer.learning.closed_form import REFINED_NAME

NETWORKS_PER_IMAGE = 2  # of a transformer, by the cascade
CLASSES = 5  # per task
IMAGES = 16  # per class, behind a task's Gaussians
FROZEN_IMAGES = 8  # per class, behind the frozen statistics: their size does not depend on it
UNITS = 32  # active bottleneck units per adapter, also of the refined feature
EVERYTHING_IS_KNOWN = -1e9  # threshold


@dataclass(frozen=True)
class Configuration:
    """A backbone to measure."""

    name: str
    backbone: str  # timm's name
    adapted_blocks: int

    def open(self, folder: Path, weights: Path | None) -> Backbone:
        """Its real weights from a folder of safetensors files; random ones where there are none."""
        if self.backbone == "tf_efficientnet_lite0":
            return open_backbone(folder, self.backbone, None, self.adapted_blocks)
        file = weights / f"{self.backbone}.safetensors" if weights else folder.with_suffix(".safetensors")
        if weights is None:
            torch.manual_seed(0)
            save_file(timm.create_model(self.backbone).state_dict(), file)
        return open_backbone(folder, self.backbone, file, self.adapted_blocks)


CONFIGURATIONS = {
    entry.name: entry
    for entry in (
        Configuration("offline default", "tf_efficientnet_lite0", 1),
        Configuration("DeiT-Ti, 2 blocks", "deit_tiny_patch16_224", 2),
        Configuration("DeiT-Ti, 12 blocks", "deit_tiny_patch16_224", 12),
    )
}


class MadeVersions:
    """A data folder whose versions have random tasks. The tasks of a smaller version are the first of a larger one."""

    def __init__(self, folder: Path, configuration: Configuration, weights: Path | None) -> None:
        self.backbone = configuration.open(folder, weights)
        self.store = VersionStore(folder)
        self._graphs = {role: self.store.add_graph(data) for role, data in export(self.backbone).items()}

    def publish(self, tasks: int, newest: int | None = None) -> int:
        """A version with this many tasks; `newest` replaces the seed of the last one."""
        seeds = [*range(tasks - 1), tasks - 1 if newest is None else newest]
        model = self._model([self._task(seed) for seed in seeds], tasks)
        names = [list(task.classes) for task in model.tasks]
        spec = self.backbone.spec
        manifest = Manifest(
            parent=self.store.current(),
            task_id=f"made-{tasks}-{newest}",
            tasks=names,
            class_ids=names,
            backbone=spec.to_dict(),
            backbone_sha256=spec.sha256,
            preprocessing_sha256=spec.preprocessing.sha256,
            graphs=self._graphs,
            rule=model.rule.to_dict(),
            threshold=float(model.novelty.threshold[0]),
            novel_above=model.novelty.novel_above,
            metrics={},
            settings={},
            data_sha256="0" * 64,
        )
        return self.store.publish(manifest, model_tensors(model), {}).version

    def _task(self, seed: int) -> TaskModel:
        rng = np.random.default_rng(seed)
        a, d = self.backbone.adapters, self.backbone.spec.dimensions

        def random(*shape: int, scale: float = 0.05) -> Array:
            return (scale * rng.standard_normal(shape)).astype(np.float32)

        labels = np.repeat(np.arange(CLASSES), IMAGES)
        z = rng.standard_normal((CLASSES, d))[labels] + 0.5 * rng.standard_normal((len(labels), d))
        return TaskModel(
            classes=tuple(f"class {seed}.{c}" for c in range(CLASSES)),
            adapters=Adapters(random(a, UNITS, d), random(a, UNITS), random(a, d, UNITS), random(a, d)),
            norm_w=self.backbone.norm_w.numpy() + random(a + 1, d),
            norm_b=self.backbone.norm_b.numpy() + random(a + 1, d),
            head=Head(random(CLASSES + 1, d), random(CLASSES + 1)),
            gaussians=Gaussians.fit(z, labels, CLASSES),
            sums=TaskSums.empty(self.backbone.spec.frozen.size, self.backbone.spec.frozen.expanded),
        )

    def _model(self, tasks: list[TaskModel], seed: int) -> Model:
        rng = np.random.default_rng(seed)
        frozen, a = self.backbone.spec.frozen, self.backbone.adapters
        labels = np.repeat(np.arange(len(tasks) * CLASSES), FROZEN_IMAGES)
        features = rng.standard_normal((len(labels), frozen.size)).astype(np.float32)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        expanded = np.maximum(rng.standard_normal((len(labels), frozen.expanded)), 0).astype(np.float32)
        cascade = None
        if not self.backbone.one_token:
            every = float(np.finfo(np.float64).max)
            cascade = Cascade(dict.fromkeys(FROZEN_TERMS, 1.0), every, NETWORKS_PER_IMAGE)
        d, width = self.backbone.spec.dimensions, 2 * UNITS
        empty = Adapters(*(np.zeros(s, np.float32) for s in ((a, width, d), (a, width), (a, d, width), (a, d))))
        novelty, refined = Novelty.empty(), self._refined(len(tasks) * CLASSES, rng)
        if refined is None:
            ones = (1.0,) * len(tasks)
            rule = Rule("fitted", dict.fromkeys(TERMS, 0.5), ones, (0.0,) * len(tasks), cascade)
        else:  # it runs no network
            rule = Rule(REFINED_NAME, dict.fromkeys(REFINED_TERMS, 0.5))
        model = Model(
            shared=SharedAdapters(empty, np.zeros((a, width), np.float32), np.zeros((a, d), np.float32)),
            tasks=tuple(tasks),
            frozen=FrozenStatistics.empty(frozen.size, frozen.expanded),
            rule=rule,
            novelty=Novelty(
                novelty.centre,
                novelty.scale,
                np.ones(len(SUMMARIES)),
                novelty.logistic,
                np.array([EVERYTHING_IS_KNOWN]),
                np.linspace(-3, 3, 64),
                np.linspace(-6, 0, 64),
            ),
            refined=refined,
        )
        return model.with_images(features, expanded, labels)

    def _refined(self, classes: int, rng: np.random.Generator) -> RefinedFeature | None:
        """The refined feature of a CNN that is cut, as every learned version has one."""
        if self.backbone.tail is None:
            return None
        shapes = {name: tuple(zeros.shape) for name, zeros in self.backbone.tail.zeros(UNITS).items()}
        tail = {name: (0.01 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
        size = self.backbone.spec.dimensions
        return RefinedFeature(
            tail, rng.standard_normal((classes, size)).astype(np.float32), np.eye(size, dtype=np.float32)
        )
