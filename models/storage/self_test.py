"""The test of a store when it is opened: does it keep the conditions of writes?

Some servers that speak the S3 protocol ignore `If-None-Match` and `If-Match` and write all the same. On such a store
two trainers would both become current, so it is refused.
"""

from __future__ import annotations

import secrets
from typing import Protocol

from models.errors import StoreError
from models.storage.interface import Storage

FOLDER = "self-test/"
State = dict[str, str]  # identifies a state of an object: its ETag, and its version where the store has versions


class ConditionalStorage(Storage, Protocol):
    """A storage whose conditions can be tested one by one."""

    def fetch(self, key: str) -> tuple[bytes, State]:
        """A value, and what identifies its present state."""

    def replace(self, key: str, state: State, data: bytes) -> bool:
        """Replace a value that is in a known state; False if it is not in this state."""


def check_conditions(storage: ConditionalStorage) -> None:
    """StoreError unless the store refuses to create a key twice, and to replace a value that has changed."""
    key = f"{FOLDER}{secrets.token_hex(8)}"
    try:
        if not storage.put_if_absent(key, b"first") or storage.get(key) != b"first":
            raise _refusal(storage, "a value that was just written is not there")
        if storage.put_if_absent(key, b"second") or storage.get(key) != b"first":
            raise _refusal(storage, "it creates a key that exists: If-None-Match is ignored")
        stale = storage.fetch(key)[1]
        if not storage.replace(key, stale, b"third") or storage.get(key) != b"third":
            raise _refusal(storage, "it does not replace a value that has not changed: If-Match is not supported")
        if storage.replace(key, stale, b"fourth") or storage.get(key) != b"third":
            raise _refusal(storage, "it replaces a value that has changed: If-Match is ignored")
    finally:
        storage.delete([key])


def _refusal(storage: Storage, reason: str) -> StoreError:
    return StoreError(
        f"the object store {storage.location('')} cannot be used, because two trainers could overwrite each other's "
        f"versions: {reason}. Use a store with conditional writes, such as Amazon S3, Google Cloud Storage, Azure, "
        "MinIO or SeaweedFS"
    )
