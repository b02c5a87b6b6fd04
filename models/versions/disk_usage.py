"""What a data folder holds, in bytes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from models.storage import DataFolder, Storage, storage_of

# Of each kind, the folders that hold it.
KINDS = {
    "versions": ("versions", "rejected", "promotions", "heads", "samples"),
    "tasks": ("tasks",),
    "graphs": ("graphs",),
    "images": ("images",),
    "features": ("features",),
    "inbox": ("inbox",),
}


def disk_usage(folder: DataFolder) -> dict[str, int]:
    """Bytes per kind. Reads the sizes of all files: seconds for a million images."""
    storage = storage_of(folder)
    root = storage.root
    if storage.shared:
        stored = {kind: sum(_stored_size(storage, name) for name in names) for kind, names in KINDS.items()}
        return stored | {"inbox": _size(root / "inbox")}
    return {kind: sum(_size(root / folder) for folder in folders) for kind, folders in KINDS.items()}


def _stored_size(storage: Storage, folder: str) -> int:
    return sum(found.size for found in storage.list(f"{folder}/"))


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed since it was listed
                total += os.lstat(os.path.join(place, name)).st_size
    return total
