"""What has been learned, as plain arrays: everything a version holds and a server needs, with no torch in sight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.inference.calibration import Calibration
from models.inference.gaussians import Gaussians
from models.inference.rules import Rule
from models.versions.aliases import label_of

Array = NDArray[np.float32]
Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Adapters:
    """A adapters of B bottleneck units over d dimensions (see models/network.py)."""

    w1: Array  # (A, B, d)
    b1: Array  # (A, B)
    w2: Array  # (A, d, B)
    b2: Array  # (A, d)


@dataclass(frozen=True)
class SharedAdapters:
    """The adapters that every task is trained in, and which of their units the tasks so far have taken."""

    adapters: Adapters
    used1: Array  # (A, B), cumulative mask of the bottleneck units, 0 or 1
    used2: Array  # (A, d), cumulative mask of the outputs

    @property
    def bottleneck(self) -> int:
        return int(self.adapters.w1.shape[1])

    @property
    def used_ratio(self) -> float:
        """The share of bottleneck units taken in the fullest adapter: 1.0 means that a layer is full."""
        return float(self.used1.mean(axis=1).max())

    @property
    def capacity(self) -> dict[str, float]:
        """How much of the adapters is taken, for reports."""
        return {"bottleneck": self.bottleneck, "used_mean": float(self.used1.mean()), "used_max": self.used_ratio}


@dataclass(frozen=True)
class Head:
    """A task's classifier: its classes, then `ood` (the last row)."""

    weight: Array  # (c + 1, d)
    bias: Array  # (c + 1,)

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(features, np.float64) @ self.weight.T.astype(np.float64) + self.bias


@dataclass(frozen=True)
class TaskModel:
    """One learned task."""

    classes: tuple[str, ...]
    adapters: Adapters  # its own folded copy: later tasks cannot reach it
    norm_w: Array  # (A + 1, d)
    norm_b: Array  # (A + 1, d)
    head: Head
    gaussians: Gaussians


@dataclass(frozen=True)
class Model:
    """All tasks learned so far, and the rule that turns their evidence into an answer."""

    shared: SharedAdapters
    tasks: tuple[TaskModel, ...]
    frozen: Gaussians  # every class, in the backbone's own feature space, one covariance (streaming LDA)
    rule: Rule
    calibration: Calibration
    aliases: Mapping[str, str | None] = field(default_factory=dict)  # what people said since: models/edits.py

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes, in the order of the tasks: the columns of every rule's scores."""
        return tuple(name for task in self.tasks for name in task.classes)

    @property
    def labels(self) -> tuple[str | None, ...]:
        """What each class is answered as; None when people retired it."""
        return tuple(label_of(name, self.aliases) for name in self.classes)

    @property
    def task_of_class(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.tasks)), [len(task.classes) for task in self.tasks]).astype(np.int64)

    def with_heads(self, heads: Mapping[int, Head]) -> Model:
        """The same model with some heads replaced: all that back-updating changes."""
        tasks = tuple(replace(task, head=heads.get(k, task.head)) for k, task in enumerate(self.tasks))
        return replace(self, tasks=tasks)

    def tensors(self) -> Tensors:
        """Every array under a flat name, ready for safetensors."""
        out = {**_flat("shared", self.shared.adapters), "shared.used1": self.shared.used1}
        out["shared.used2"] = self.shared.used2
        out |= _flat("frozen", self.frozen) | _flat("calibration", self.calibration)
        for k, task in enumerate(self.tasks):
            out |= _flat(f"task.{k}", task.adapters) | _flat(f"task.{k}.head", task.head)
            out |= _flat(f"task.{k}.gaussians", task.gaussians)
            out |= {f"task.{k}.norm_w": task.norm_w, f"task.{k}.norm_b": task.norm_b}
        return {name: np.ascontiguousarray(array) for name, array in out.items()}

    @classmethod
    def from_tensors(
        cls, tensors: Tensors, classes: list[list[str]], rule: Rule, aliases: Mapping[str, str | None] | None = None
    ) -> Model:
        """The inverse of `tensors`; the classes, the rule and the aliases come from the manifest."""
        tasks = tuple(
            TaskModel(
                classes=tuple(names),
                adapters=_read(Adapters, tensors, f"task.{k}"),
                norm_w=tensors[f"task.{k}.norm_w"],
                norm_b=tensors[f"task.{k}.norm_b"],
                head=_read(Head, tensors, f"task.{k}.head"),
                gaussians=_read(Gaussians, tensors, f"task.{k}.gaussians"),
            )
            for k, names in enumerate(classes)
        )
        shared = SharedAdapters(_read(Adapters, tensors, "shared"), tensors["shared.used1"], tensors["shared.used2"])
        frozen = _read(Gaussians, tensors, "frozen")
        for task in tasks:
            if len(task.head.bias) != len(task.classes) + 1 or len(task.gaussians.means) != len(task.classes):
                raise ValueError(
                    f"the task of {', '.join(task.classes)} has another number of classes than its tensors"
                )
        if len(frozen.means) != sum(len(names) for names in classes):
            raise ValueError("the frozen statistics have another number of classes than the tasks")
        return cls(shared, tasks, frozen, rule, _read(Calibration, tensors, "calibration"), dict(aliases or {}))


T = TypeVar("T", Adapters, Head, Gaussians, Calibration)


def _flat(prefix: str, part: Adapters | Head | Gaussians | Calibration) -> Tensors:
    return {f"{prefix}.{entry.name}": getattr(part, entry.name) for entry in fields(part)}


def _read(kind: type[T], tensors: Tensors, prefix: str) -> T:
    return kind(**{entry.name: tensors[f"{prefix}.{entry.name}"] for entry in fields(kind)})
