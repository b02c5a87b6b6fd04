"""The backbone's exported graphs on ONNX Runtime: pixels to features, on a CPU or a GPU, without torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np
from threadpoolctl import threadpool_limits

from models.errors import CorruptVersion
from models.inference.cascade import Chosen
from models.inference.evidence import Array, Features
from models.inference.model import Model, TaskModel
from models.inference.providers import CUDA, Device, open_session
from models.inference.refined import RefinedFeature
from models.inference.rotations import TURNS, with_turned
from models.inference.task_networks import SelectedGraph, Tokens, run_bound
from models.versions.manifest import Manifest
from models.versions.store import VersionStore

ROLES = ("trunk", "blocks", "frozen")  # of the graphs that every backbone has (models/network/export.py)
SELECTED = "selected"  # of a transformer's graph for chosen tasks; missing in data folders of older releases
TAIL = "tail"  # of a CNN that is cut before its last stages (models/network/tail.py)
CHUNK = 32  # images per pass: bounds memory and still occupies all cores
GPU_BATCH_SIZES = (1, 2, 4, 8, 16, CHUNK)  # a batch on a GPU is padded to one of these


class Runtime:
    """The graphs of one backbone by role, loaded; runs any task of that backbone. Thread-safe."""

    def __init__(self, graphs: Mapping[str, bytes | Path], device: Device = "auto", threads: int | None = None) -> None:
        _limit_blas_threads()
        threads = threads or _available_cores()
        self._trunk, self._blocks, self._frozen = (open_session(graphs[role], device, threads) for role in ROLES)
        # On a GPU one call for all pairs of image and task saves many small ones. A CPU is faster task by task.
        self._selected: SelectedGraph | None = None
        if SELECTED in graphs and self.device == "cuda":
            self._selected = SelectedGraph(open_session(graphs[SELECTED], device, threads), self.device)
        self._tail = open_session(graphs[TAIL], device, threads) if TAIL in graphs else None
        # A single batch is fastest on all cores; concurrent batches have a higher throughput with one thread each.
        concurrent = self.device == "cpu" and threads > 1
        self._single_threaded = Runtime(graphs, device, 1) if concurrent else self

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device that ONNX Runtime actually uses."""
        return "cuda" if CUDA in self._blocks.get_providers() else "cpu"

    def features(self, model: Model, pixels: Array, all_threads: bool = True) -> Features:
        """The features of images (n, 3, H, W) under every task and the frozen backbone; runs the trunk once per image.

        Pass `all_threads=False` while other batches are computed at the same time.
        """
        if not all_threads and self._single_threaded is not self:
            return self._single_threaded.features(model, pixels)
        chunks = [self._chunk(model, pixels[start : start + CHUNK]) for start in range(0, len(pixels), CHUNK)]
        if len(chunks) == 1:
            return chunks[0]
        f, m = (out.shape[1] for out in self._frozen.get_outputs())
        networks = len(model.tasks) if model.rule.uses_networks else 0
        shapes = (networks, 0, self._dimensions), (0, f), (0, m)
        empty = Features(*(np.zeros(shape, np.float32) for shape in shapes))
        parts = [empty, *chunks]  # the empty one gives every array its width if there are no images
        ran = [part.ran for part in chunks if part.ran is not None]
        turned = [part.turned for part in chunks if part.turned is not None]
        refined = [part.refined for part in chunks if part.refined is not None]
        return Features(
            np.concatenate([part.tasks for part in parts], axis=1),
            np.concatenate([part.frozen for part in parts]),
            np.concatenate([part.expanded for part in parts]),
            np.concatenate(ran) if ran else None,
            np.concatenate(turned, axis=2) if turned else None,
            np.concatenate(refined) if refined else None,
        )

    def _chunk(self, model: Model, pixels: Array) -> Features:
        count = len(pixels)
        networks = bool(model.tasks) and model.rule.uses_networks
        turns = networks and model.rule.rotations > 1
        rows = with_turned(pixels) if turns else pixels
        extra = self._padded_size(len(rows)) - len(rows)
        tokens, maps = self._trunk_outputs(
            np.pad(rows, ((0, extra), (0, 0), (0, 0), (0, 0))) if extra else rows, model.uses_refined
        )
        refined = None if maps is None or model.refined is None else self._refined_features(maps, model.refined)[:count]
        turned_tokens = None
        if turns:
            every = _array(tokens)
            tokens, turned_tokens = every[:count], every[count : len(rows)]
        feature, expanded = (part[:count] for part in self._frozen_features(tokens))
        if not networks:
            none = np.zeros((0, count, self._dimensions), np.float32)
            return Features(none, feature, expanded, refined=refined)
        ran = None if self._one_token else model.networks_to_run(model.frozen.scores(feature, expanded))
        tasks = self._task_features(model, tokens, count, ran)
        turned = None
        if turned_tokens is not None:
            again = None if ran is None else np.tile(ran, (TURNS, 1))
            flat = self._task_features(model, turned_tokens, TURNS * count, again)  # (T, 3 n, d)
            turned = flat.reshape(len(flat), TURNS, count, -1).swapaxes(0, 1)
        return Features(tasks, feature, expanded, ran, turned, refined)

    def _task_features(self, model: Model, tokens: Tokens, count: int, ran: Chosen | None) -> Array:
        """z of the first `count` rows under every network that runs: (T, n, d)."""
        if self._one_token:
            # What follows in the token is for the frozen feature only.
            return model.one_token_networks.features(_array(tokens)[:count, 0, : self._dimensions])
        everything = np.ones((count, len(model.tasks)), bool)
        return self._chosen_features(model, tokens, everything if ran is None else ran)

    def _chosen_features(self, model: Model, tokens: Tokens, chosen: Chosen) -> Array:
        """z of the chosen tasks, 0 elsewhere: (T, n, d)."""
        if self._selected is not None:
            return self._selected.features(tokens, model.stacked_networks, chosen)
        every = _array(tokens)
        out = np.zeros((*chosen.T.shape, self._dimensions), np.float32)
        for k in np.flatnonzero(chosen.any(axis=0)).tolist():
            rows = np.flatnonzero(chosen[:, k])
            out[k, rows] = self.task_features(every[rows], model.tasks[k])
        return out

    @property
    def _one_token(self) -> bool:
        return bool(self._trunk.get_outputs()[0].shape[1] == 1)

    @property
    def _dimensions(self) -> int:
        """d"""
        return int(self._blocks.get_outputs()[0].shape[1])

    def _trunk_outputs(self, pixels: Array, with_map: bool) -> tuple[Tokens, Tokens | None]:
        """The tokens, and the map that the tail starts from, if it is asked for; on a GPU they stay there."""
        outputs = ["tokens", "map"] if with_map and self._tail is not None else ["tokens"]
        if self.device == "cpu":
            found = self._trunk.run(outputs, {"pixels": pixels})
        else:
            found = run_bound(self._trunk, self.device, outputs, {}, {"pixels": pixels}, keep=True)
        return found[0], found[1] if len(found) > 1 else None

    def _refined_features(self, maps: Tokens, refined: RefinedFeature) -> Array:
        if isinstance(maps, np.ndarray):
            return self.refined_features(maps, refined.tail)
        out: Array = run_bound(self._tail, self.device, ["features"], {"map": maps}, refined.tail, keep=False)[0]
        return out

    def _frozen_features(self, tokens: Tokens) -> tuple[Array, Array]:
        if isinstance(tokens, np.ndarray):
            return self.frozen_features(tokens)
        feature, expanded = run_bound(
            self._frozen, self.device, ["feature", "expanded"], {"tokens": tokens}, {}, keep=False
        )
        return feature, expanded

    def tokens(self, pixels: Array) -> Array:
        """The output of the frozen trunk, the same for every task: (n, 3, H, W) -> (n, P, d), for a CNN (n, 1, f)."""
        out: Array = self._trunk.run(["tokens"], {"pixels": pixels})[0]
        return out

    def task_features(self, tokens: Array, task: TaskModel) -> Array:
        """z (n, d) under one task's network."""
        out: Array = self._blocks.run(["features"], {"tokens": tokens, **task.network._asdict()})[0]
        return out

    def frozen_features(self, tokens: Array) -> tuple[Array, Array]:
        """The frozen feature (n, f), the same for every task, and its random features (n, M)."""
        feature, expanded = self._frozen.run(["feature", "expanded"], {"tokens": tokens})
        return feature, expanded

    def maps(self, pixels: Array) -> Array:
        """What the tail starts from: (n, 3, H, W) -> (n, c, h, w)."""
        out: Array = self._trunk.run(["map"], {"pixels": pixels})[0]
        return out

    def refined_features(self, maps: Array, tail: Mapping[str, Array]) -> Array:
        """The outputs of the tail with these adapters: (n, r)."""
        if self._tail is None:
            raise ValueError("the backbone has no tail to refine")
        out: Array = self._tail.run(["features"], {"map": maps, **tail})[0]
        return out

    def warm_up_sizes(self, largest: int) -> list[int]:
        """The batch sizes to run once before serving batches of up to `largest` images."""
        if self.device == "cpu":
            return [largest]
        return [size for size in GPU_BATCH_SIZES if size < largest] + [self._padded_size(largest)]

    def _padded_size(self, count: int) -> int:
        """A GPU compiles kernels for each new batch size, so it gets few of them; a CPU would compute the padding."""
        return count if self.device == "cpu" else next((size for size in GPU_BATCH_SIZES if size >= count), count)


class RuntimeCache:
    """One `Runtime` per backbone, shared by all versions made with it and freed with the last of them.

    The tasks of a version are inputs of the graphs, so a new version needs no new session.
    """

    def __init__(self, store: VersionStore, device: Device = "auto", threads: int | None = None) -> None:
        self._store, self._device, self._threads = store, device, threads
        self._runtimes: WeakValueDictionary[tuple[str, ...], Runtime] = WeakValueDictionary()
        self._lock = threading.Lock()

    def get(self, manifest: Manifest) -> Runtime:
        """The runtime of a version whose graphs were verified."""
        missing = [role for role in ROLES if role not in manifest.graphs]
        if missing:
            raise CorruptVersion(f"version {manifest.version}: its manifest names no graph for {' and '.join(missing)}")
        roles = [*ROLES, *(role for role in (SELECTED, TAIL) if role in manifest.graphs)]
        key = tuple(manifest.graphs[role] for role in roles)
        with self._lock:
            runtime = self._runtimes.get(key)
            if runtime is None:
                paths = {role: self._store.graph_path(sha256) for role, sha256 in zip(roles, key, strict=True)}
                runtime = self._runtimes[key] = Runtime(paths, self._device, self._threads)
            return runtime


def _array(tokens: Tokens) -> Array:
    if isinstance(tokens, np.ndarray):
        return tokens
    out: Array = tokens.numpy()
    return out


@cache
def _limit_blas_threads() -> None:
    """Limit BLAS to one thread in this process: the products beside the graphs are small, and its threads would
    compete with those of ONNX Runtime.
    """
    threadpool_limits(1, user_api="blas")


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
