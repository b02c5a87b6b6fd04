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
from models.inference.evidence import Array, Features
from models.inference.model import Model, TaskModel
from models.inference.providers import CUDA, Device, open_session
from models.versions.manifest import Manifest
from models.versions.store import VersionStore

ROLES = ("trunk", "blocks", "frozen")  # of the graphs (models/network/export.py)
CHUNK = 32  # images per pass: bounds memory and still occupies all cores
GPU_BATCH_SIZES = (1, 2, 4, 8, 16, CHUNK)  # a batch on a GPU is padded to one of these


class Runtime:
    """The graphs of one backbone by role, loaded; runs any task of that backbone. Thread-safe."""

    def __init__(self, graphs: Mapping[str, bytes | Path], device: Device = "auto", threads: int | None = None) -> None:
        _limit_blas_threads()
        threads = threads or _available_cores()
        self._trunk, self._blocks, self._frozen = (open_session(graphs[role], device, threads) for role in ROLES)
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
        d, f, m = (out.shape[1] for session in (self._blocks, self._frozen) for out in session.get_outputs())
        # An empty first chunk gives every array its width if there are no images.
        tasks: list[list[Array]] = [[np.zeros((0, d), np.float32)] for _ in model.tasks]
        frozen, expanded = [np.zeros((0, f), np.float32)], [np.zeros((0, m), np.float32)]
        for start in range(0, len(pixels), CHUNK):
            chunk = pixels[start : start + CHUNK]
            count = len(chunk)
            extra = self._padded_size(count) - count
            tokens = self.tokens(np.pad(chunk, ((0, extra), (0, 0), (0, 0), (0, 0))) if extra else chunk)
            for parts, part in zip((frozen, expanded), self.frozen_features(tokens), strict=True):
                parts.append(part[:count])
            for parts, task in zip(tasks, model.tasks, strict=True):
                parts.append(self.task_features(tokens, task)[:count])
        return Features([np.concatenate(parts) for parts in tasks], np.concatenate(frozen), np.concatenate(expanded))

    def tokens(self, pixels: Array) -> Array:
        """The output of the frozen trunk, the same for every task: (n, 3, H, W) -> (n, P, d), for a CNN (n, 1, f)."""
        out: Array = self._trunk.run(["tokens"], {"pixels": pixels})[0]
        return out

    def task_features(self, tokens: Array, task: TaskModel) -> Array:
        """z (n, d) under one task's network."""
        a = task.adapters
        feeds = {"tokens": tokens, "w1": a.w1, "b1": a.b1, "w2": a.w2, "b2": a.b2}
        feeds |= {"norm_w": task.norm_w, "norm_b": task.norm_b}
        out: Array = self._blocks.run(["features"], feeds)[0]
        return out

    def frozen_features(self, tokens: Array) -> tuple[Array, Array]:
        """The frozen feature (n, f), the same for every task, and its random features (n, M)."""
        feature, expanded = self._frozen.run(["feature", "expanded"], {"tokens": tokens})
        return feature, expanded

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
        key = tuple(manifest.graphs[role] for role in ROLES)
        with self._lock:
            runtime = self._runtimes.get(key)
            if runtime is None:
                paths = {role: self._store.graph_path(sha256) for role, sha256 in zip(ROLES, key, strict=True)}
                runtime = self._runtimes[key] = Runtime(paths, self._device, self._threads)
            return runtime


@cache
def _limit_blas_threads() -> None:
    """Limit BLAS to one thread in this process: the products beside the graphs are small, and its threads would
    compete with those of ONNX Runtime.
    """
    threadpool_limits(1, user_api="blas")


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
