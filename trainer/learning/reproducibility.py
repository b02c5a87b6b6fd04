"""Reproducible training: the same seed, batch and parent give the same weights, also after an interruption."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from threadpoolctl import ThreadpoolController, threadpool_limits

from models.errors import BackboneError
from trainer.learning.settings import LearnerSettings


def random_stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """A generator that depends only on the seed and the purpose, never on what was drawn before.

    A resumed training therefore draws the same numbers as an uninterrupted one.
    """
    name = "/".join(str(part) for part in (seed, *purpose))
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def configure_torch(settings: LearnerSettings) -> None:
    """Call once per process, before the first tensor operation."""
    # HAT's masks and their gradients underflow by design, and CPUs compute denormal numbers a hundred times slower:
    # flushing them to zero halves an epoch. Threads inherit the flag, so it is set before they are created.
    torch.set_flush_denormal(True)
    limit_threads(settings)
    torch.use_deterministic_algorithms(True)
    # No operation here reads memory that it has not written. To fill it costs a sixth of the refinement's time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Let BLAS use so many threads: sums of products depend on their number."""
    with _blas().limit(limits=count, user_api="blas"):
        yield


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    """Found once: looking at all loaded libraries takes a millisecond."""
    return ThreadpoolController()


def limit_threads(settings: LearnerSettings) -> None:
    """Of torch and BLAS: sums of products depend on their number."""
    torch.set_num_threads(settings.threads)
    threadpool_limits(settings.threads, user_api="blas")


def select_device(settings: LearnerSettings) -> str:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise BackboneError("OPENWORLD_DEVICE is cuda, but PyTorch finds no CUDA device: use auto or cpu")
    if not available or settings.device == "cpu":
        return "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this setting
    if (rank := os.environ.get("LOCAL_RANK")) is not None:  # several processes, one GPU each
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    return "cuda"
