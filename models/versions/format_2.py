"""Migration of a data folder from format 2 to 3: each task is stored once.

Format 2 stored everything again in the folder of each version:

    versions/000007/   manifest.json, model.safetensors, samples.json; the same in rejected/<task>/
    promotions.jsonl   one promotion per line

Its frozen statistics have one scatter and one Gram matrix for all tasks, and its shared adapters one value per entry.
Neither can be divided among the tasks, so a migrated version names them as its *base*: a content of their own. Tasks
that are learned later add to the base, and store their part with themselves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError

from models.errors import CorruptVersion
from models.files import discard, sha256_bytes
from models.storage import LocalFiles
from models.versions.contents import content_key, encode, entries
from models.versions.manifest import Manifest
from models.versions.promotions import Promotion, entry_key

log = logging.getLogger(__name__)

Tensors = dict[str, NDArray[Any]]
MANIFEST, TENSORS, SAMPLES = "manifest.json", "model.safetensors", "samples.json"


def from_2_to_3(root: Path) -> None:
    """May be killed and run again: a folder of format 2 is removed after all that follows from it is written."""
    storage = LocalFiles(root)
    for place in ("versions", "rejected"):
        for folder in sorted(path for path in (root / place).glob("[!.]*") if path.is_dir()):
            try:
                manifest, contents = _converted(folder)
            except (CorruptVersion, FileNotFoundError, ValueError, KeyError, SafetensorError) as error:
                log.warning("%s is damaged and was left out, its files are in format-2: %s", folder, error)
            else:
                for role, content in contents.items():
                    storage.put_if_absent(content_key(role, sha256_bytes(content)), content)
                storage.put_if_absent(f"{place}/{folder.name}.json", manifest.to_json())
            discard(folder)
    path = root / "promotions.jsonl"
    if path.exists():
        for number, line in enumerate(_promotions(path.read_bytes()), 1):
            storage.put_if_absent(entry_key(number), line.model_dump_json().encode())
        storage.delete([path.name])


def _promotions(data: bytes) -> Iterator[Promotion]:
    """An incomplete line was cut off by a crash, before its promotion took effect."""
    for line in data.split(b"\n"):
        with suppress(ValidationError):
            yield Promotion.model_validate_json(line)


def _converted(folder: Path) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of a version in format 3, and its contents."""
    document = json.loads((folder / MANIFEST).read_bytes())
    data = {name: (folder / name).read_bytes() for name in (TENSORS, SAMPLES)}
    for name, content in data.items():
        if sha256_bytes(content) != document["files"][name]["sha256"]:
            raise CorruptVersion(f"{name} does not match its sha256")
    tensors = _renamed(safetensors.numpy.load(data[TENSORS]), [len(names) for names in document["tasks"]])
    contents = encode(tensors, json.loads(data[SAMPLES]))
    files = {role: entry.model_dump() for role, entry in entries(contents).items()}
    return Manifest.from_json(json.dumps({**document, "schema_version": 2, "files": files}).encode()), contents


def _renamed(old: Tensors, classes: list[int]) -> Tensors:
    """The tensors under the names of format 3; `classes` is the number of classes per task."""
    new = {name: old[name] for name in old if name.startswith("novelty.")}
    new |= {f"base/{name}": old[name] for name in old if name.startswith("shared.")}
    new |= {f"base/{name}": old[f"frozen.{name}"] for name in ("scatter", "gram")}
    ends = np.cumsum(classes)
    for k, (start, end) in enumerate(zip(ends - classes, ends, strict=True)):
        prefix = f"task.{k}."
        for name in (name for name in old if name.startswith(prefix)):
            own = name.removeprefix(prefix)
            new[f"head.{k}.{own.removeprefix('head.')}" if own.startswith("head.") else f"task.{k}/{own}"] = old[name]
        for name in ("counts", "means", "moments"):
            new[f"task.{k}/frozen.{name}"] = old[f"frozen.{name}"][start:end]
        for name, matrix in (("scatter", "means"), ("gram", "moments")):
            size = old[f"frozen.{matrix}"].shape[1]
            new[f"task.{k}/frozen.{name}"] = np.zeros((0, size), np.float32)
            new[f"task.{k}/frozen.{name}_signs"] = np.zeros(0, np.int8)
    return new
