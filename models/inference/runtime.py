"""The exported graphs on ONNX Runtime: pixels to features, on a CPU or a GPU, with no torch in sight."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from models.errors import BackboneError
from models.inference.evidence import Features
from models.inference.model import Model, TaskModel

# It reports to its makers unless told not to, and keeps what it could not send in the home folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

log = logging.getLogger(__name__)

Array = NDArray[np.float32]
Device = Literal["auto", "cpu", "cuda"]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
CHUNK = 32  # images a pass: bounded memory, and the cores are busy
PADDED = (1, 2, 4, 8, 16, CHUNK)  # what a batch on a GPU is filled up to

_LOG_ERRORS = 3  # ONNX Runtime warns of every input that has a default value, which ours have on purpose
_UNREADABLE = (
    ort_errors.Fail,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


def choose(device: Device, available: Collection[str], gpu: bool) -> list[str]:
    """The providers to ask for, best first. `available` is what the build claims, `gpu` what the machine has."""
    if device == "cpu":
        return [CPU]
    if CUDA in available and gpu:
        return [CUDA, CPU]
    if device == "cuda":
        why = (
            "this machine has no NVIDIA GPU or driver"
            if CUDA in available
            else "this onnxruntime is built without CUDA"
        )
        raise BackboneError(_no_cuda(why))
    return [CPU]


def confirm(device: Device, asked: Sequence[str], got: Sequence[str]) -> None:
    """Compare what was asked for with `session.get_providers()`, which alone tells the truth."""
    if CUDA not in asked or CUDA in got:
        return
    why = "ONNX Runtime could not start CUDA; its CUDA and cuDNN libraries may be missing or of another version"
    if device == "cuda":
        raise BackboneError(_no_cuda(why))
    log.warning("There is a GPU, but %s. Using the CPU.", why)


def _no_cuda(why: str) -> str:
    return f"the device `cuda` was asked for, but {why}: install what is missing, or choose the device `auto` or `cpu`"


def gpu_present() -> bool:
    """Ask the driver. Asking ONNX Runtime for CUDA on a machine without it works too, but shouts on stderr."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


class Runtime:
    """One backbone's graphs, loaded; any task of that backbone runs on it. Safe to call from several threads."""

    def __init__(
        self, trunk: bytes | Path, blocks: bytes | Path, device: Device = "auto", threads: int | None = None
    ) -> None:
        _one_blas_thread()
        threads = threads or _cores()
        self._trunk, self._blocks = (_session(graph, device, threads) for graph in (trunk, blocks))
        # One image alone is quickest on all cores; several side by side need none of the waiting that this takes.
        side_by_side = self.device == "cpu" and threads > 1
        self._narrow = Runtime(trunk, blocks, device, 1) if side_by_side else self

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where it really runs."""
        return "cuda" if CUDA in self._blocks.get_providers() else "cpu"

    @property
    def dimensions(self) -> int:
        """d, the length of a feature."""
        return int(self._blocks.get_outputs()[0].shape[1])

    def tokens(self, pixels: Array) -> Array:
        """What the frozen trunk makes of images: (N, 3, H, W) -> (N, P, d), to be used for every task."""
        out: Array = self._trunk.run(["tokens"], {"pixels": pixels})[0]
        return out

    def features(self, tokens: Array, task: TaskModel) -> Array:
        """z under one task's network: (N, P, d) -> (N, d)."""
        a = task.adapters
        feeds = {"tokens": tokens, "w1": a.w1, "b1": a.b1, "w2": a.w2, "b2": a.b2}
        feeds |= {"norm_w": task.norm_w, "norm_b": task.norm_b}
        out: Array = self._blocks.run(["features"], feeds)[0]
        return out

    def frozen_features(self, tokens: Array) -> Array:
        """The backbone's own feature: the task that is the graph's default (see models/export.py)."""
        out: Array = self._blocks.run(["features"], {"tokens": tokens})[0]
        return out

    def sizes(self, largest: int) -> list[int]:
        """The batch sizes worth warming up, up to `largest`."""
        if self.device == "cpu":
            return [largest]
        return [size for size in PADDED if size < largest] + [self._padded(largest)]

    def _padded(self, count: int) -> int:
        """A GPU prepares itself for every new shape, so it gets few of them; a CPU would compute what is padded."""
        return count if self.device == "cpu" else next((size for size in PADDED if size >= count), count)

    def features_of(self, model: Model, pixels: Array, alone: bool = True) -> Features:
        """Every task's feature and the frozen one, the trunk computed once an image.

        `alone`: nothing else is computed meanwhile, so that all threads may be used.
        """
        if not alone and self._narrow is not self:
            return self._narrow.features_of(model, pixels)
        tasks: list[list[Array]] = [[] for _ in model.tasks]
        frozen: list[Array] = []
        for start in range(0, len(pixels), CHUNK):
            chunk = pixels[start : start + CHUNK]
            count = len(chunk)
            extra = self._padded(count) - count
            tokens = self.tokens(np.pad(chunk, ((0, extra), (0, 0), (0, 0), (0, 0))) if extra else chunk)
            frozen.append(self.frozen_features(tokens)[:count])
            for parts, task in zip(tasks, model.tasks, strict=True):
                parts.append(self.features(tokens, task)[:count])
        nothing = np.zeros((0, self.dimensions), np.float32)
        return Features([np.concatenate([nothing, *parts]) for parts in tasks], np.concatenate([nothing, *frozen]))


@cache
def _one_blas_thread() -> None:
    """For the whole process. The products beside the graphs are small: more threads cost more than they save, and
    theirs would fight with ONNX Runtime's for the same cores.
    """
    threadpool_limits(1, user_api="blas")


def _session(graph: bytes | Path, device: Device, threads: int) -> onnxruntime.InferenceSession:
    asked = choose(device, onnxruntime.get_available_providers(), device != "cpu" and gpu_present())
    if CUDA in asked:
        _preload_cuda()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_ERRORS
    # A number of its own: left to itself, ONNX Runtime pins threads to cores that a container may not have.
    options.intra_op_num_threads = threads
    # Threads that spin while they wait take the cores from decoding, from other lanes, and from the trainer.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), sess_options=options, providers=asked
        )
    except _UNREADABLE as error:
        raise BackboneError(
            f"ONNX Runtime cannot load the backbone's graph ({error}): restore the file, or upgrade onnxruntime"
        ) from error
    confirm(device, asked, session.get_providers())
    return session


def _preload_cuda() -> None:
    """Let ONNX Runtime find the CUDA libraries of NVIDIA's wheels; what is missing there may be on the system."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    log.debug("preloading CUDA: %s", said.getvalue())


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
