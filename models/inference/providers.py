"""ONNX Runtime sessions on the right execution provider: CUDA where a GPU is present, the CPU elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from models.errors import BackboneError

# ONNX Runtime sends telemetry by default and stores unsent reports in the home folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

log = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda"]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_LOG_ERRORS_ONLY = 3  # with a GPU, ONNX Runtime warns that it runs operations on shapes on the CPU, as it should


def open_session(graph: bytes | Path, device: Device, threads: int) -> onnxruntime.InferenceSession:
    """Load a graph on the best provider that `device` allows; BackboneError when it cannot be loaded there."""
    requested = choose_providers(device, onnxruntime.get_available_providers(), device != "cpu" and gpu_present())
    if CUDA in requested:
        _preload_cuda()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_ERRORS_ONLY
    # An explicit number: by default ONNX Runtime pins threads to cores that a container may not have.
    options.intra_op_num_threads = threads
    # Spinning threads take cores from image decoding, other batches and the trainer.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), sess_options=options, providers=requested
        )
    except Exception as error:  # the errors of ONNX Runtime have no base class of their own
        raise BackboneError(
            f"ONNX Runtime cannot load the backbone's graph ({error}): restore the file, or upgrade onnxruntime"
        ) from error
    check_providers(device, requested, session.get_providers())
    return session


def choose_providers(device: Device, available: Collection[str], gpu: bool) -> list[str]:
    """The providers to request, best first; `available` lists those of the ONNX Runtime build, `gpu` the hardware."""
    if device == "cpu":
        return [CPU]
    if CUDA in available and gpu:
        return [CUDA, CPU]
    if device == "cuda":
        no_gpu = "this machine has no NVIDIA GPU or driver"
        raise BackboneError(_no_cuda(no_gpu if CUDA in available else "this onnxruntime is built without CUDA"))
    return [CPU]


def check_providers(device: Device, requested: Sequence[str], active: Sequence[str]) -> None:
    """Compare the request with `session.get_providers()`: ONNX Runtime falls back to the CPU without an error."""
    if CUDA not in requested or CUDA in active:
        return
    reason = "ONNX Runtime could not start CUDA; its CUDA and cuDNN libraries may be missing or of another version"
    if device == "cuda":
        raise BackboneError(_no_cuda(reason))
    log.warning("using the CPU although a GPU is present: %s", reason)


def _no_cuda(reason: str) -> str:
    return f"device `cuda` is not available: {reason}; install what is missing, or choose the device `auto` or `cpu`"


def gpu_present() -> bool:
    """Ask the CUDA driver; requesting CUDA from ONNX Runtime on a machine without it prints errors to stderr."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _preload_cuda() -> None:
    """Load the CUDA libraries of NVIDIA's wheels; the system may provide those that are missing there."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        onnxruntime.preload_dlls()
    log.debug("preloading CUDA: %s", output.getvalue())
