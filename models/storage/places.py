"""The place of a data folder: a path, or a storage that a program has opened."""

from __future__ import annotations

from pathlib import Path

from models.errors import StoreError
from models.storage.interface import Storage
from models.storage.local_files import LocalFiles

DataFolder = Path | Storage  # a path stands for the local files in it
CACHE_BYTES = 8 * 2**30


def storage_of(folder: DataFolder) -> Storage:
    return LocalFiles(folder) if isinstance(folder, Path) else folder


def open_storage(
    root: Path, url: str | None = None, cache_bytes: int = CACHE_BYTES, *, copies: Path | None = None, test: bool = True
) -> Storage:
    """The local files in `root`; with a URL the object store, of which at most `cache_bytes` are kept in `copies`.

    StoreError if the store cannot be used: it does not answer, or ignores conditions. Without `test` nothing is written
    to find that out: for a caller that only reads.
    """
    if not url:
        return LocalFiles(root)
    from models.storage.object_cache import FOLDER, ObjectCache

    try:
        # Imported here: local files need no package for object stores.
        from models.storage.object_store import open_object_store
    except ModuleNotFoundError as error:
        raise StoreError(f"OPENWORLD_STORE needs {error.name}: pip install 'openworld[scale]'") from error

    return open_object_store(url, root, ObjectCache(copies or root / FOLDER, cache_bytes), test=test)
