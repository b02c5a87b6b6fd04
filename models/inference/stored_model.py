"""Models as tensors of a version, and back.

    task.<k>/...    what the task has learned, never changed: adapters, norms; its Gaussians and its part of the frozen
                    statistics, changed only by further images of its classes; what it left in the shared adapters
    head.<k>.*, novelty.*    of the version: back-updating changes every head, and calibration the novelty decision
    refined/...     of the version: the adapters of its refined feature, and the statistics of all classes under them
    provisional/... of a provisional version only: what its pending tasks add in closed form, and the novelty decision
                    with them; all other contents are those of the version without the pending tasks
    base/...        of a migrated folder only: see models/versions/format_2.py

The frozen statistics of all tasks are the sum of the parts, added up when a version is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.errors import CorruptVersion
from models.images import Preprocessing
from models.inference.evidence import Floats
from models.inference.factors import TaskSums, add_sums, symmetric
from models.inference.frozen import FrozenStatistics
from models.inference.gaussians import Gaussians
from models.inference.model import Head, Model, StoredBase, StoredTask, TaskModel
from models.inference.novelty import REFINED_SUMMARIES, SUMMARIES, Novelty
from models.inference.refined import RefinedFeature
from models.inference.rules import Rule
from models.inference.shared_adapters import Adapters, AdapterUpdate, SharedAdapters
from models.inference.supermask import Supermask
from models.versions.backbone_spec import BackboneSpec
from models.versions.contents import BASE, HEADS, PROVISIONAL, REFINED, task_role
from models.versions.manifest import FileEntry, Manifest
from models.versions.reader import LoadedVersion

Tensors = dict[str, NDArray[Any]]
NO_WEIGHT = {"centre": 0.0, "scale": 1.0, "weights": 0.0}  # of an input of the novelty decision

# Writing


def model_tensors(model: Model) -> Tensors:
    """Every array by a flat name, for `VersionStore.publish`."""
    out = _version_tensors(model)
    if model.base is not None:
        out |= {"base/scatter": model.base.scatter, "base/gram": model.base.gram}
        out |= _prefixed("base/shared.", model.base.shared.tensors())
    for k in range(len(model.tasks)):
        out |= _prefixed(f"{task_role(k)}/", _task_tensors(model, k))
    if model.refined is not None:
        out |= _prefixed(f"{REFINED}/", model.refined.tensors())
    return out


@dataclass(frozen=True)
class ClosedForm:
    """What the pending tasks of a provisional version add to the learned ones."""

    sums: TaskSums
    classes: NDArray[np.int64]  # (c,), the classes whose statistics change, as columns of the scores; new ones last
    counts: NDArray[np.int64]  # (c,), their statistics after the change
    means: NDArray[np.floating]  # (c, f)
    moments: NDArray[np.floating]  # (c, M)

    def tensors(self, novelty: Novelty) -> Tensors:
        """The content of the version, with its novelty decision."""
        rows = {"classes": self.classes, "counts": self.counts}
        rows |= {name: getattr(self, name).astype(np.float32) for name in ("means", "moments")}
        out = _prefixed("frozen.", {**rows, **self.sums.tensors()}) | _novelty_tensors(novelty)
        return _prefixed(f"{PROVISIONAL}/", out)


def new_tensors(model: Model) -> tuple[Tensors, dict[str, FileEntry]]:
    """The tensors that are not in the store yet, and the contents that are: what did not change."""
    out, stored = _version_tensors(model), dict[str, FileEntry]()
    if model.refined is not None and model.refined.entry is not None:
        stored[REFINED] = model.refined.entry
    elif model.refined is not None:
        out |= _prefixed(f"{REFINED}/", model.refined.tensors())
    if model.base is not None:
        stored[BASE] = model.base.entry
    for k, task in enumerate(model.tasks):
        if task.stored is not None and _unchanged(task, task.stored):
            stored[task_role(k)] = task.stored.entry
        else:
            out |= _prefixed(f"{task_role(k)}/", _task_tensors(model, k))
    return out, stored


def _version_tensors(model: Model) -> Tensors:
    out = _novelty_tensors(model.novelty)
    for k, task in enumerate(model.tasks):
        out |= _prefixed(f"head.{k}.", _flat(task.head))
    return out


def _task_tensors(model: Model, k: int) -> Tensors:
    task, own = model.tasks[k], model.task_of_class == k
    if task.sums is None:
        raise ValueError(f"the model was read for answering only: task {k} has no sums to store")
    network = _flat(task.adapters) if task.supermask is None else task.supermask.tensors()
    out: Tensors = {**network, "norm_w": task.norm_w, "norm_b": task.norm_b}
    out |= _prefixed("gaussians.", _flat(task.gaussians))
    out |= {"frozen.counts": model.frozen.counts[own]}
    out |= {f"frozen.{name}": getattr(model.frozen, name)[own].astype(np.float32) for name in ("means", "moments")}
    out |= _prefixed("frozen.", task.sums.tensors())
    return out | (_prefixed("shared.", task.update.tensors()) if task.update is not None else {})


def _unchanged(task: TaskModel, stored: StoredTask) -> bool:
    """By identity: what changes a task replaces the part that changes. The sums change with the class statistics."""
    return all(
        getattr(task, name) is getattr(stored, name)
        for name in ("adapters", "norm_w", "norm_b", "gaussians", "sums", "update")
    )


# Reading


def read_model(loaded: LoadedVersion, last: Model | None = None) -> tuple[Model, Preprocessing]:
    """The model and the preprocessing of a verified version, with all that a trainer needs; without pending tasks.

    `last` is a model that was read before and holds the tasks that `loaded` was read without (`contents_of`). If the
    version only adds tasks to it, only those are added up; the result has the same bits with and without it.
    CorruptVersion if its tensors and manifest do not fit. `ModelCache` reads models that only answer.
    """
    manifest = loaded.manifest
    with readable(manifest):
        spec = BackboneSpec.from_dict(manifest.backbone)
        held = [task.stored for task in last.tasks if task.stored] if last else []
        known = {task.entry: task for task in held}
        entries = {role: manifest.files[role] for role in map(task_role, range(manifest.learned_tasks))}
        tasks = [known.get(entry) or read_task(entry, loaded.contents[role]) for role, entry in entries.items()]
        base = read_base(manifest.files[BASE], loaded.contents[BASE]) if BASE in manifest.files else None
        shared, new = base.shared if base else None, tasks
        if last and held and tasks[: len(held)] == held and _has_base(last, manifest):
            shared, new = last.shared, tasks[len(held) :]
            scatter, gram = last.frozen.scatter.copy(), last.frozen.gram.copy()
        else:
            scatter, gram = base_matrices(base, spec)
        for task in new:
            if task.sums is not None:
                add_sums([task.sums], scatter, gram)  # one by one: another order of the same sums has other last bits
            if task.update is not None:
                a, d = task.update.used2.shape
                shared = task.update.applied(shared or SharedAdapters.empty(a, d))
        if shared is None and tasks:
            raise ValueError("no task holds the shared adapters")
        frozen = summed(tasks, [], scatter, gram, spec)
        model = assembled(manifest, loaded.contents, tasks, frozen, shared or SharedAdapters.empty(), base)
        return model, checked_preprocessing(manifest, spec)


def contents_of(model: Model | None) -> set[str]:
    """The hashes of the contents that a model was read from and still holds."""
    return {task.stored.entry.sha256 for task in model.tasks if task.stored} if model else set()


def _has_base(model: Model, manifest: Manifest) -> bool:
    return (model.base.entry if model.base else None) == manifest.files.get(BASE)


@contextmanager
def readable(manifest: Manifest) -> Iterator[None]:
    """CorruptVersion if the tensors of the version do not fit its manifest."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptVersion(
            f"version {manifest.version}: not in the format that this openworld reads ({error!r}); upgrade openworld"
        ) from error


def read_task(entry: FileEntry, tensors: Mapping[str, NDArray[Any]]) -> StoredTask:
    frozen, shared = _below("frozen.", tensors), _below("shared.", tensors)
    supermask = Supermask.from_tensors(tensors)
    return StoredTask(
        entry,
        adapters=_part(Adapters, tensors) if supermask is None else supermask.adapters(),
        supermask=supermask,
        norm_w=tensors["norm_w"],
        norm_b=tensors["norm_b"],
        gaussians=_part(Gaussians, _below("gaussians.", tensors)),
        counts=frozen["counts"],
        means=frozen["means"],
        moments=frozen["moments"],
        sums=read_sums(tensors),
        update=AdapterUpdate.from_tensors(shared) if shared else None,
    )


def read_novelty(tensors: Mapping[str, NDArray[Any]]) -> Novelty:
    """The novelty decision; one that was fitted before a summary was an input gives it no weight."""
    own = _below("novelty.", tensors)
    absent = {len(SUMMARIES) - 3: ("output_distance", *REFINED_SUMMARIES), len(SUMMARIES) - 2: REFINED_SUMMARIES}
    for missing in absent.get(len(own["weights"]), ()):
        own |= {name: np.insert(own[name], SUMMARIES.index(missing), value) for name, value in NO_WEIGHT.items()}
    return _part(Novelty, own)


def _novelty_tensors(novelty: Novelty) -> Tensors:
    """Without inputs of a refined feature that has no weight: older servers read such a version too."""
    own = _flat(novelty)
    if not novelty.uses_refined:
        places = [SUMMARIES.index(name) for name in REFINED_SUMMARIES]
        own |= {name: np.delete(own[name], places) for name in NO_WEIGHT}
    return _prefixed("novelty.", own)


def with_pending(frozen: FrozenStatistics, tensors: Mapping[str, NDArray[Any]]) -> FrozenStatistics:
    """The statistics with the class rows of the pending tasks; both matrices have their sums already."""
    rows = _below("frozen.", tensors)
    out = frozen.with_classes(max(int(rows["classes"].max(initial=-1)) + 1 - len(frozen.counts), 0))
    for name in ("counts", "means", "moments"):
        getattr(out, name)[rows["classes"]] = rows[name]
    return out


def read_sums(tensors: Mapping[str, NDArray[Any]]) -> TaskSums:
    """Only the sums of a task's content."""
    return TaskSums.from_tensors(_below("frozen.", tensors))


def read_base(entry: FileEntry, tensors: Mapping[str, NDArray[Any]]) -> StoredBase:
    shared = SharedAdapters.from_tensors(_below("shared.", tensors))
    return StoredBase(entry, tensors["scatter"], tensors["gram"], shared)


def base_matrices(base: StoredBase | None, spec: BackboneSpec) -> tuple[Floats, Floats]:
    """Scatter and Gram matrix before the parts of the tasks are added: (f, f), (M, M)."""
    f, m = spec.frozen.size, spec.frozen.expanded
    return (
        (np.zeros((f, f)), np.zeros((m, m))) if base is None else (symmetric(base.scatter, f), symmetric(base.gram, m))
    )


def summed(
    tasks: Sequence[StoredTask], sums: Iterable[TaskSums], scatter: Floats, gram: Floats, spec: BackboneSpec
) -> FrozenStatistics:
    """The frozen statistics of all tasks. Adds the sums to the two matrices in place."""
    add_sums(sums, scatter, gram)
    means = np.concatenate([np.zeros((0, len(scatter))), *(task.means for task in tasks)])
    moments = np.concatenate([np.zeros((0, len(gram))), *(task.moments for task in tasks)])
    counts = np.concatenate([np.zeros(0, np.int64), *(task.counts for task in tasks)])
    return FrozenStatistics(counts, means, scatter, moments, gram, spec.frozen.output_size)


def assembled(
    manifest: Manifest,
    contents: Mapping[str, Mapping[str, NDArray[Any]]],
    stored: Sequence[StoredTask],
    frozen: FrozenStatistics,
    shared: SharedAdapters,
    base: StoredBase | None,
) -> Model:
    """The model of the learned tasks of a version from its parts; `contents` has its heads and its refined feature."""
    tensors = contents[HEADS]
    if len(stored) > len(manifest.tasks) or (len(stored) < len(manifest.tasks) and PROVISIONAL not in manifest.files):
        raise ValueError("the manifest names contents of another number of tasks")
    tasks = []
    for k, (names, task) in enumerate(zip(manifest.tasks, stored, strict=False)):  # pending tasks have no content
        head = _part(Head, _below(f"head.{k}.", tensors))
        if not len(head.bias) - 1 == len(task.gaussians.means) == len(task.counts) == len(names):
            raise ValueError(f"the tensors of the task {', '.join(names)} have another number of classes")
        parts = (task.adapters, task.norm_w, task.norm_b, head, task.gaussians)
        tasks.append(TaskModel(tuple(names), *parts, task.sums, task.update, task.supermask, stored=task))
    rule = Rule.from_dict(manifest.refined_rule or manifest.rule)
    aliases = {name: to for name, to in manifest.aliases.items() if any(name in task.classes for task in tasks)}
    refined = RefinedFeature.from_tensors(contents[REFINED], manifest.files[REFINED]) if REFINED in contents else None
    return Model(shared, tuple(tasks), frozen, rule, read_novelty(tensors), aliases, base, refined=refined)


def checked_preprocessing(manifest: Manifest, spec: BackboneSpec) -> Preprocessing:
    if spec.preprocessing.sha256 != manifest.preprocessing_sha256:
        raise ValueError("the preprocessing does not match its sha256")
    return spec.preprocessing


# Names

T = TypeVar("T", Adapters, Head, Gaussians, Novelty)


def _flat(part: Adapters | Head | Gaussians | Novelty) -> Tensors:
    named = {entry.name: getattr(part, entry.name) for entry in fields(part)}
    return {name: array for name, array in named.items() if array is not None}


def _part(kind: type[T], tensors: Mapping[str, NDArray[Any]]) -> T:
    wanted = [entry.name for entry in fields(kind) if entry.default is MISSING or entry.name in tensors]
    return kind(**{name: tensors[name] for name in wanted})


def _prefixed(prefix: str, tensors: Mapping[str, NDArray[Any]]) -> Tensors:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _below(prefix: str, tensors: Mapping[str, NDArray[Any]]) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
