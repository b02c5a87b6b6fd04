"""Loads versions for answering, and reads of each only what no loaded version has.

**Loading the version after a loaded one reads its manifest, its heads, its samples and one task.** Versions share the
tasks that they have in common, in memory as well; versions that differ by edits only share their statistics too. What
only a trainer needs (shared adapters, a task's part of the sums) is not kept.

The frozen statistics of a version are those of the loaded version that has most tasks in common with it, plus the parts
of the tasks that it lacks, less the parts of those that it has too many. A version that has learned the pending task of
the one before has equal statistics, and shares them with all that was computed from them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from models.errors import CorruptVersion
from models.images import Preprocessing
from models.inference.factors import TaskSums, add_sums
from models.inference.frozen import FrozenStatistics
from models.inference.model import Model, StoredTask
from models.inference.rules import Rule
from models.inference.shared_adapters import SharedAdapters
from models.inference.stored_model import (
    assembled,
    base_matrices,
    checked_preprocessing,
    read_base,
    read_novelty,
    read_sums,
    read_task,
    readable,
    summed,
    with_pending,
)
from models.versions.backbone_spec import BackboneSpec
from models.versions.contents import BASE, PROVISIONAL, decode_tensors, task_role
from models.versions.manifest import FileEntry, Manifest
from models.versions.reader import LoadedVersion
from models.versions.store import VersionStore


@dataclass(frozen=True)
class LoadedModel:
    """A verified version that can answer."""

    manifest: Manifest
    model: Model
    preprocessing: Preprocessing


Entries = tuple[FileEntry, ...]  # of the tasks of a version, in order, and of its pending tasks
Frozen = dict[tuple[FileEntry | None, Entries], FrozenStatistics]  # by the base and the tasks that they are the sum of


@dataclass(frozen=True, eq=False)
class _Start:
    """Loaded statistics from which those of another version follow."""

    statistics: FrozenStatistics
    tasks: Entries  # that they are the sum of
    added: Entries  # that the other version has in addition
    removed: list[TaskSums]  # of the tasks that it does not have


class ModelCache:
    """The models of one data folder. Thread-safe. Holds no version: it shares what its callers still hold."""

    def __init__(self, store: VersionStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._tasks: WeakValueDictionary[str, StoredTask] = WeakValueDictionary()
        self._frozen: WeakValueDictionary[tuple[FileEntry | None, Entries], FrozenStatistics] = WeakValueDictionary()

    def load(self, n: int | None = None, *, expect_backbone: str | None = None) -> LoadedModel:
        """Load version `n`, by default the current one, and verify the hash of all that is read."""
        with self._lock:  # not while files are read: a swap must not wait for the load of another version
            known, frozen = dict(self._tasks), dict(self._frozen)  # strong references until the end of this call
        n = self._store.current() if n is None else n
        start, skip = None, set[str]()
        if n is not None and (start := self._start(self._store.manifest(n), frozen)) is not None:
            # A task that is not in the sum, or that no version holds any more, is read.
            skip = {entry.sha256 for entry in start.tasks if entry not in start.added} & known.keys()
        loaded = self._store.load(n, expect_backbone=expect_backbone, skip=skip)
        with readable(loaded.manifest):
            return self._assembled(loaded, known, start)

    def _assembled(self, loaded: LoadedVersion, known: dict[str, StoredTask], start: _Start | None) -> LoadedModel:
        manifest = loaded.manifest
        base, entries = _entries(manifest)
        spec = BackboneSpec.from_dict(manifest.backbone)
        sums: dict[str, TaskSums] = {}
        for role in _roles(manifest):
            entry = manifest.files[role]
            if (tensors := loaded.contents.get(role)) is not None:
                sums[entry.sha256] = read_sums(tensors)
                if role != PROVISIONAL and entry.sha256 not in known:
                    task = read_task(entry, tensors)
                    known[entry.sha256] = replace(task, gaussians=task.gaussians.for_answers(), sums=None, update=None)
        tasks = [known[manifest.files[role].sha256] for role in _roles(manifest) if role != PROVISIONAL]
        if start is None:
            matrices = base_matrices(read_base(base, loaded.contents[BASE]) if base else None, spec)
            frozen = summed(tasks, [sums[entry.sha256] for entry in entries], *matrices, spec)
        elif start.tasks == entries:
            frozen = start.statistics
        else:
            added = [sums[entry.sha256] for entry in start.added]
            scatter, gram = start.statistics.scatter, start.statistics.gram
            if _equal_sums(added, start.removed):  # a pending task was learned: its images are the same
                added = []
            else:
                scatter, gram = scatter.copy(), gram.copy()
                add_sums(start.removed, scatter, gram, -1)
            frozen = summed(tasks, added, scatter, gram, spec)
        pending = loaded.contents.get(PROVISIONAL)
        if pending is not None and (start is None or start.tasks != entries):
            frozen = with_pending(frozen, pending)
        if start is not None and _equal_statistics(frozen, start.statistics):
            frozen = start.statistics  # with their inverses, which take longer than the rest of a load
        model = assembled(manifest, loaded.contents, tasks, frozen, SharedAdapters.empty(), None)
        if pending is not None:
            model = _provisional(model, manifest, pending)
        preprocessing = checked_preprocessing(manifest, spec)
        with self._lock:
            self._tasks.update({task.entry.sha256: task for task in tasks})
            self._frozen[base, entries] = frozen
        return LoadedModel(manifest, model, preprocessing)

    def _start(self, manifest: Manifest, frozen: Frozen) -> _Start | None:
        """The loaded statistics that need the fewest changes; None if it is less work to add up all tasks."""
        base, entries = _entries(manifest)
        candidates = [(tasks, statistics) for (other, tasks), statistics in frozen.items() if other == base]
        if not candidates:
            return None
        candidates.reverse()  # of equal ones the last
        # A task in place of another is one change: a pending task that was learned has equal sums as a rule.
        tasks, statistics = min(
            candidates, key=lambda one: max(len(_more(one[0], entries)), len(_more(entries, one[0])))
        )
        added, removed = _more(entries, tasks), _more(tasks, entries)
        if len(added) + len(removed) > len(entries) / 2:
            return None
        try:
            contents = [self._store.content(task_role(0), entry, "a loaded version") for entry in removed]
            gone = [read_sums(decode_tensors(data, "a loaded version")) for data in contents]
        except CorruptVersion:
            return None  # pruned since
        return _Start(statistics, tasks, added, gone)


def _provisional(model: Model, manifest: Manifest, tensors: Mapping[str, NDArray[Any]]) -> Model:
    """The model with the pending tasks."""
    pending = tuple(tuple(names) for names in manifest.tasks[len(model.tasks) :])
    rule, novelty = Rule.from_dict(manifest.rule), read_novelty(tensors)
    model = replace(model, rule=rule, novelty=novelty, aliases=manifest.aliases, pending=pending)
    if len(model.frozen.counts) != len(model.classes):
        raise ValueError("the pending tasks have another number of classes")
    return model


def _roles(manifest: Manifest) -> list[str]:
    """The contents that have a part in the frozen statistics."""
    roles = [task_role(k) for k in range(manifest.learned_tasks)]
    return [*roles, PROVISIONAL] if PROVISIONAL in manifest.files else roles


def _entries(manifest: Manifest) -> tuple[FileEntry | None, Entries]:
    """The base, if there is one, and what is added to it; CorruptVersion if one is missing."""
    with readable(manifest):
        return manifest.files.get(BASE), tuple(manifest.files[role] for role in _roles(manifest))


def _equal_sums(one: Sequence[TaskSums], other: Sequence[TaskSums]) -> bool:
    """Bit by bit."""
    return len(one) == len(other) and all(
        np.array_equal(mine, theirs)
        for first, second in zip(one, other, strict=True)
        for mine, theirs in zip(first.tensors().values(), second.tensors().values(), strict=True)
    )


def _equal_statistics(one: FrozenStatistics, other: FrozenStatistics) -> bool:
    """Whether both have the same matrices, and equal classes."""
    return (
        one.scatter is other.scatter
        and one.gram is other.gram
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("counts", "means", "moments"))
    )


def _more(one: Entries, other: Entries) -> Entries:
    """The entries that `one` has more often than `other`."""
    return tuple((Counter(one) - Counter(other)).elements())
