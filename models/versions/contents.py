"""The contents of versions: files that are named by the hash of their bytes, written once and shared by versions.

    tasks/<sha256>.safetensors    what a task has learned, the closed form of pending tasks, the base of a migrated
                                  folder, or the refined feature of a version
    heads/<sha256>.safetensors    what every version has anew: the heads of all tasks, and the novelty decision
    samples/<sha256>.json.gz      the images that a version names

A manifest names its contents by *role*: `heads`, `samples`, `task.0`, `task.1`, ..., `provisional`, `base`, `refined`.
A tensor `task.0/w1` belongs to the content `task.0`; a tensor without such a prefix belongs to the heads.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from models.errors import CorruptVersion, StoreError
from models.versions.manifest import FileEntry, canonical_json

HEADS, SAMPLES, BASE, PROVISIONAL, REFINED = "heads", "samples", "base", "provisional", "refined"
FOLDERS = ("tasks/", "heads/", "samples/")
_SHARED = re.compile(r"(task\.[0-9]+|base|provisional|refined)/(.+)", re.DOTALL)

Tensors = Mapping[str, NDArray[Any]]


def task_role(k: int) -> str:
    return f"task.{k}"


def content_key(role: str, sha256: str) -> str:
    """The storage key of a content."""
    if role == SAMPLES:
        return f"samples/{sha256}.json.gz"
    return f"heads/{sha256}.safetensors" if role == HEADS else f"tasks/{sha256}.safetensors"


def encode(tensors: Tensors, samples: Any) -> dict[str, bytes]:
    """The bytes of each content, by role; equal values give equal bytes."""
    by_role: dict[str, dict[str, NDArray[Any]]] = {HEADS: {}}
    for name, tensor in tensors.items():
        shared = _SHARED.fullmatch(name)
        role, own = shared.groups() if shared else (HEADS, name)
        # safetensors writes the memory of an array in order: the values of a transposed view would be permuted.
        by_role.setdefault(role, {})[own] = np.asarray(tensor, order="C")
    try:
        out = {role: safetensors.numpy.save(own) for role, own in by_role.items()}
    except SafetensorError as error:
        raise StoreError(f"the tensors cannot be written: {error}") from error
    # Hashes of images are most of the samples; written as text they have twice their size. Higher levels save 3 % more.
    out[SAMPLES] = gzip.compress(canonical_json(samples, what="the samples"), 1, mtime=0)
    return out


def decode_tensors(data: bytes, name: str) -> dict[str, NDArray[Any]]:
    try:
        return safetensors.numpy.load(data)
    except SafetensorError as error:
        raise CorruptVersion(f"{name}: {error}") from error


def samples_text(data: bytes, name: str) -> bytes:
    """The JSON of the samples."""
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptVersion(f"{name}: not gzip ({error})") from error


def flat(contents: Mapping[str, Tensors]) -> dict[str, NDArray[Any]]:
    """All tensors of a version by the names that `encode` reads."""
    return {
        name if role == HEADS else f"{role}/{name}": tensor
        for role, own in contents.items()
        for name, tensor in own.items()
    }


def entries(contents: Mapping[str, bytes]) -> dict[str, FileEntry]:
    return {role: FileEntry.of(data) for role, data in contents.items()}
