"""A learned model as plain arrays, without torch: all that a version stores and a server needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.errors import CorruptVersion
from models.images import Preprocessing
from models.inference.cascade import without_others
from models.inference.evidence import Array, Evidence, Features, FrozenScores
from models.inference.frozen import FrozenStatistics
from models.inference.gaussians import Gaussians
from models.inference.novelty import Novelty
from models.inference.one_token import OneTokenNetworks, TaskArrays
from models.inference.rules import Rule
from models.inference.stacked import StackedScores
from models.inference.task_networks import StackedNetworks
from models.versions.backbone_spec import BackboneSpec
from models.versions.edits import Aliases, label_of
from models.versions.manifest import Manifest
from models.versions.store import LoadedVersion

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Adapters:
    """A adapters of B bottleneck units over d dimensions (see models/network/adapted_blocks.py)."""

    w1: Array  # (A, B, d)
    b1: Array  # (A, B)
    w2: Array  # (A, d, B)
    b2: Array  # (A, d)


@dataclass(frozen=True)
class SharedAdapters:
    """The adapters that every task is trained in, and the units that the tasks so far use."""

    adapters: Adapters
    used1: Array  # (A, B), cumulative mask of the bottleneck units, 0 or 1
    used2: Array  # (A, d), cumulative mask of the outputs

    @property
    def bottleneck(self) -> int:
        return int(self.adapters.w1.shape[1])

    @property
    def used_ratio(self) -> float:
        """The share of used bottleneck units in the fullest adapter; at 1.0 a layer has no free unit."""
        return float(self.used1.mean(axis=1).max())

    @property
    def capacity(self) -> dict[str, float]:
        """Used units, for reports."""
        return {"bottleneck": self.bottleneck, "used_mean": float(self.used1.mean()), "used_max": self.used_ratio}


@dataclass(frozen=True)
class Head:
    """A task's classifier: its classes, then `ood` in the last row."""

    weight: Array  # (c + 1, d)
    bias: Array  # (c + 1,)

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(features, np.float64) @ self.weight.T.astype(np.float64) + self.bias


@dataclass(frozen=True)
class TaskModel:
    """One learned task."""

    classes: tuple[str, ...]
    adapters: Adapters  # a folded copy: later tasks do not change it
    norm_w: Array  # (A + 1, d)
    norm_b: Array  # (A + 1, d)
    head: Head
    gaussians: Gaussians

    @property
    def network(self) -> TaskArrays:
        a = self.adapters
        return TaskArrays(a.w1, a.b1, a.w2, a.b2, self.norm_w, self.norm_b)


class ActiveLabels(NamedTuple):
    """The labels that can be answered, and their classes; merged classes have the same label."""

    names: tuple[str, ...]  # in the order of their first classes
    classes: NDArray[np.int64]  # the classes of the first label, then those of the second, ...
    starts: NDArray[np.int64]  # where each label starts in `classes`


@dataclass(frozen=True)
class Model:
    """All tasks learned so far, and the two decisions over their evidence: which class, and whether novel."""

    shared: SharedAdapters
    tasks: tuple[TaskModel, ...]
    frozen: FrozenStatistics  # of all classes
    rule: Rule
    novelty: Novelty
    aliases: Aliases = field(default_factory=dict)  # merged and retired classes

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """All classes, in the order of the tasks: the columns of every rule's scores."""
        return tuple(name for task in self.tasks for name in task.classes)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Classes per task."""
        return tuple(len(task.classes) for task in self.tasks)

    @cached_property
    def labels(self) -> tuple[str | None, ...]:
        """The label that each class is answered as; None for a retired class."""
        return tuple(label_of(name, self.aliases) for name in self.classes)

    @cached_property
    def active_labels(self) -> ActiveLabels:
        members: dict[str, list[int]] = {}
        for c, label in enumerate(self.labels):
            if label is not None:
                members.setdefault(label, []).append(c)
        starts = np.cumsum([0, *map(len, members.values())])[:-1]
        classes = [c for own in members.values() for c in own]
        return ActiveLabels(tuple(members), np.array(classes, np.int64), starts.astype(np.int64))

    @cached_property
    def task_of_class(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.tasks)), self.counts).astype(np.int64)

    @cached_property
    def one_token_networks(self) -> OneTokenNetworks:
        """The networks of all tasks, for a backbone with one token."""
        return OneTokenNetworks([task.network for task in self.tasks])

    @cached_property
    def stacked_networks(self) -> StackedNetworks:
        """The networks of all tasks, for a transformer."""
        return StackedNetworks([task.network for task in self.tasks])

    @cached_property
    def _scores(self) -> StackedScores:
        heads = [task.head for task in self.tasks]
        gaussians = [task.gaussians for task in self.tasks]
        return StackedScores(gaussians, [head.weight for head in heads], [head.bias for head in heads])

    def evidence(self, features: Features) -> Evidence:
        """Everything that the two decisions may weigh, for the features of n images; with the rule's cascade."""
        frozen = self.frozen.scores(features.frozen, features.expanded)
        evidence = self._scores.evidence(np.asarray(features.tasks, np.float32), frozen)
        ran = features.ran if features.ran is not None else self.networks_to_run(frozen)
        return evidence if ran is None else without_others(evidence, ran)

    def networks_to_run(self, frozen: FrozenScores) -> NDArray[np.bool_] | None:
        """The networks that this model's rule needs for images with these frozen scores: (n, T), or None for all."""
        return self.rule.cascade.choose(frozen, self.counts) if self.rule.cascade else None

    def with_heads(self, heads: Mapping[int, Head]) -> Model:
        """The model with some heads replaced; back-updating changes nothing else."""
        tasks = tuple(replace(task, head=heads.get(k, task.head)) for k, task in enumerate(self.tasks))
        return replace(self, tasks=tasks)

    def tensors(self) -> Tensors:
        """Every array by a flat name, for safetensors."""
        out = {**_flat("shared", self.shared.adapters), "shared.used1": self.shared.used1}
        out["shared.used2"] = self.shared.used2
        out |= {f"frozen.{name}": array for name, array in self.frozen.tensors().items()}
        out |= _flat("novelty", self.novelty)
        for k, task in enumerate(self.tasks):
            out |= _flat(f"task.{k}", task.adapters) | _flat(f"task.{k}.head", task.head)
            out |= _flat(f"task.{k}.gaussians", task.gaussians)
            out |= {f"task.{k}.norm_w": task.norm_w, f"task.{k}.norm_b": task.norm_b}
        return {name: np.ascontiguousarray(array) for name, array in out.items()}


def read_model(loaded: LoadedVersion) -> tuple[Model, Preprocessing]:
    """The model and the preprocessing of a verified version; CorruptVersion if its tensors and manifest do not fit."""
    manifest = loaded.manifest
    try:
        preprocessing = BackboneSpec.from_dict(manifest.backbone).preprocessing
        if preprocessing.sha256 != manifest.preprocessing_sha256:
            raise ValueError("the preprocessing does not match its sha256")
        return _read(loaded.tensors, manifest), preprocessing
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptVersion(
            f"version {manifest.version}: not in the format that this openworld reads ({error!r}); upgrade openworld"
        ) from error


def _read(tensors: Tensors, manifest: Manifest) -> Model:
    """The inverse of `Model.tensors`."""
    tasks = tuple(
        TaskModel(
            classes=tuple(names),
            adapters=_part(Adapters, tensors, f"task.{k}"),
            norm_w=tensors[f"task.{k}.norm_w"],
            norm_b=tensors[f"task.{k}.norm_b"],
            head=_part(Head, tensors, f"task.{k}.head"),
            gaussians=_part(Gaussians, tensors, f"task.{k}.gaussians"),
        )
        for k, names in enumerate(manifest.tasks)
    )
    shared = SharedAdapters(_part(Adapters, tensors, "shared"), tensors["shared.used1"], tensors["shared.used2"])
    named = {name.removeprefix("frozen."): array for name, array in tensors.items() if name.startswith("frozen.")}
    frozen, novelty = FrozenStatistics.from_tensors(named), _part(Novelty, tensors, "novelty")
    for task in tasks:
        if len(task.head.bias) != len(task.classes) + 1 or len(task.gaussians.means) != len(task.classes):
            raise ValueError(f"the tensors of the task {', '.join(task.classes)} have another number of classes")
    if len(frozen.means) != len(manifest.classes):
        raise ValueError("the frozen statistics have another number of classes than the tasks")
    return Model(shared, tasks, frozen, Rule.from_dict(manifest.rule), novelty, manifest.aliases)


T = TypeVar("T", Adapters, Head, Gaussians, Novelty)


def _flat(prefix: str, part: Adapters | Head | Gaussians | Novelty) -> Tensors:
    return {f"{prefix}.{entry.name}": getattr(part, entry.name) for entry in fields(part)}


def _part(kind: type[T], tensors: Tensors, prefix: str) -> T:
    return kind(**{entry.name: tensors[f"{prefix}.{entry.name}"] for entry in fields(kind)})
