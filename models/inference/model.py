"""A learned model as plain arrays, without torch: all that a server needs, and all that a trainer builds on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.inference.cascade import without_others
from models.inference.evidence import Array, Evidence, Features, FrozenScores
from models.inference.factors import TaskSums
from models.inference.frozen import FrozenStatistics, Labels, Rows
from models.inference.gaussians import Gaussians
from models.inference.novelty import Novelty
from models.inference.one_token import OneTokenNetworks, TaskArrays
from models.inference.refined import RefinedFeature
from models.inference.rotations import TurnedHeads
from models.inference.rules import Rule, without_networks
from models.inference.shared_adapters import Adapters, AdapterUpdate, SharedAdapters
from models.inference.stacked import StackedScores
from models.inference.supermask import Supermask
from models.inference.task_networks import StackedNetworks
from models.versions.edits import Aliases, label_of
from models.versions.manifest import FileEntry

# Parts of a model, for importers.
__all__ = ["Adapters", "Gaussians", "Head", "Model", "SharedAdapters", "StoredBase", "StoredTask", "TaskModel"]


@dataclass(frozen=True)
class Head:
    """A task's classifier: its classes, then `ood` in the last row, with a bias of -inf if the head has no `ood`."""

    weight: Array  # (c + 1, d)
    bias: Array  # (c + 1,)
    turned_weight: Array | None = None  # (3, c, d), for the image turned by 90, 180 and 270 degrees (rotations.py)
    turned_bias: Array | None = None  # (3, c)

    @classmethod
    def without_ood(
        cls, weight: Array, bias: Array, turned_weight: Array | None = None, turned_bias: Array | None = None
    ) -> Head:
        """From the outputs of the classes alone: weight (c, d), bias (c,)."""
        ood = np.zeros_like(weight[:1]), np.full(1, -np.inf, np.float32)
        return cls(np.concatenate([weight, ood[0]]), np.concatenate([bias, ood[1]]), turned_weight, turned_bias)

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(features, np.float64) @ self.weight.T.astype(np.float64) + self.bias


@dataclass(frozen=True, eq=False)
class StoredTask:
    """A task's content as it was read. Versions that name the same content share it."""

    entry: FileEntry
    adapters: Adapters
    supermask: Supermask | None
    norm_w: Array
    norm_b: Array
    gaussians: Gaussians
    counts: NDArray[np.int64]  # (c,), its classes' rows of the frozen statistics
    means: Array  # (c, f)
    moments: Array  # (c, M)
    sums: TaskSums | None
    update: AdapterUpdate | None


@dataclass(frozen=True, eq=False)
class StoredBase:
    """What the tasks of a folder of format 2 have in common: the sums that cannot be divided among them."""

    entry: FileEntry
    scatter: Array  # lower triangle
    gram: Array  # lower triangle
    shared: SharedAdapters


@dataclass(frozen=True)
class TaskModel:
    """One learned task."""

    classes: tuple[str, ...]
    adapters: Adapters  # a folded copy: later tasks do not change it
    norm_w: Array  # (A + 1, d)
    norm_b: Array  # (A + 1, d)
    head: Head
    gaussians: Gaussians
    sums: TaskSums | None = None  # its part of the frozen statistics; None in a model that only answers
    update: AdapterUpdate | None = None  # of the shared adapters; None also for a task of a migrated folder
    supermask: Supermask | None = None  # the adapters are the fixed weights under this mask
    stored: StoredTask | None = None  # the content that it was read from; see models/inference/stored_model.py

    @property
    def network(self) -> TaskArrays:
        a = self.adapters
        return TaskArrays(a.w1, a.b1, a.w2, a.b2, self.norm_w, self.norm_b)

    @cached_property
    def one_token_network(self) -> OneTokenNetworks:
        """The network alone, for a backbone with one token."""
        return OneTokenNetworks([self.network])


class ActiveLabels(NamedTuple):
    """The labels that can be answered, and their classes; merged classes have the same label."""

    names: tuple[str, ...]  # in the order of their first classes
    classes: NDArray[np.int64]  # the classes of the first label, then those of the second, ...
    starts: NDArray[np.int64]  # where each label starts in `classes`


@dataclass(frozen=True)
class Model:
    """All tasks learned so far, and the two decisions over their evidence: which class, and whether novel.

    The model of a provisional version also knows classes without a network, after those of the learned tasks.
    """

    shared: SharedAdapters
    tasks: tuple[TaskModel, ...]
    frozen: FrozenStatistics  # of all classes
    rule: Rule
    novelty: Novelty
    aliases: Aliases = field(default_factory=dict)  # merged and retired classes
    base: StoredBase | None = None  # of a migrated folder: what its tasks have in common
    pending: tuple[tuple[str, ...], ...] = ()  # the classes of each task that is not learned yet
    refined: RefinedFeature | None = None  # of all learned classes; None: no version has learned it

    @cached_property
    def classes_by_task(self) -> tuple[tuple[str, ...], ...]:
        return (*(task.classes for task in self.tasks), *self.pending)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """All classes, in the order of the tasks: the columns of every rule's scores."""
        return tuple(name for names in self.classes_by_task for name in names)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Classes per task."""
        return tuple(map(len, self.classes_by_task))

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
        return np.repeat(np.arange(len(self.counts)), self.counts).astype(np.int64)

    @property
    def uses_refined(self) -> bool:
        """Whether a decision weighs the refined feature."""
        return self.refined is not None and (self.rule.uses_refined or self.novelty.uses_refined)

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

    @cached_property
    def _turned_heads(self) -> TurnedHeads:
        return TurnedHeads([(task.head.turned_weight, task.head.turned_bias) for task in self.tasks])

    def evidence(self, features: Features, frozen: FrozenScores | None = None) -> Evidence:
        """Everything that the two decisions may weigh, for the features of n images; with the rule's cascade.

        `frozen`: the frozen scores if they are known, for example of images that are left out of the statistics.
        """
        frozen = frozen or self.frozen.scores(features.frozen, features.expanded)
        refined = None
        if self.refined is not None and features.refined is not None:
            refined = self.refined.scores(features.refined)
        if not self.rule.uses_networks:
            return without_networks(self.rule, self.counts, frozen, refined)
        evidence = replace(self._scores.evidence(np.asarray(features.tasks, np.float32), frozen), refined=refined)
        if features.turned is not None:
            logits = self._turned_heads.ensemble(evidence.class_logits, features.turned)
            evidence = replace(evidence, class_logits=logits)
        ran = features.ran if features.ran is not None else self.networks_to_run(frozen)
        return evidence if ran is None else without_others(evidence, ran)

    def networks_to_run(self, frozen: FrozenScores) -> NDArray[np.bool_] | None:
        """The networks that this model's rule needs for images with these frozen scores: (n, T), or None for all."""
        return self.rule.cascade.choose(frozen, self.counts) if self.rule.cascade else None

    def with_heads(self, heads: Mapping[int, Head]) -> Model:
        """The model with some heads replaced; back-updating changes nothing else."""
        tasks = tuple(replace(task, head=heads.get(k, task.head)) for k, task in enumerate(self.tasks))
        return replace(self, tasks=tasks)

    def with_images(self, features: Rows, expanded: Rows, labels: Labels) -> Model:
        """Add images to the frozen statistics of their classes; every class of a new task needs one."""
        added = len(self.classes) - len(self.frozen.counts)
        frozen = self.frozen.with_images(features, expanded, labels, added)
        rows = self.frozen.with_classes(added).scatter_rows(features, labels, 1)
        return replace(self, frozen=frozen, tasks=self._changed_sums(*rows, expanded, labels, 1))

    def without_images(self, features: Rows, expanded: Rows, labels: Labels) -> Model:
        """Remove images from the frozen statistics of their classes."""
        frozen = self.frozen.without_images(features, expanded, labels)
        rows = self.frozen.scatter_rows(features, labels, -1)
        return replace(self, frozen=frozen, tasks=self._changed_sums(*rows, expanded, labels, -1))

    def _changed_sums(
        self, rows: Rows, row_classes: Labels, expanded: Rows, labels: Labels, sign: int
    ) -> tuple[TaskModel, ...]:
        owner, tasks = self.task_of_class, []
        for k, task in enumerate(self.tasks):
            if task.sums is not None and (own := owner[labels] == k).any():
                h = np.asarray(expanded[own], np.float64)
                task = replace(task, sums=task.sums.changed(rows[owner[row_classes] == k], h, sign))
            tasks.append(task)
        return tuple(tasks)
