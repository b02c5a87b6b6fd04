"""Storage of a data folder: keys are relative paths with `/`, values are bytes.

Versions and images stand on this interface, which local files and object stores implement. Most values never change:
`put_if_absent`. The few that do, such as the number of the current version, are replaced by `compare_and_set`. **Every
write is complete or absent, and survives a power cut when the call returns.**
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple, Protocol


class Stored(NamedTuple):
    """A value in the storage, without its bytes."""

    key: str
    size: int
    time: float  # of the last write, in seconds since the epoch


Operation = Literal["get", "head", "put", "delete", "list"]
# missing: there is no such key. conflict: the condition of a write does not hold. failed: no answer, or an error.
Outcome = Literal["ok", "missing", "conflict", "refused", "failed"]
Observer = Callable[[Operation, Outcome, float], None]  # with the seconds of one request


class StoreUnavailable(OSError):
    """The object store does not answer, also after retries. What it holds is not known."""


def is_unavailable(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, is StoreUnavailable."""
    while error is not None:
        if isinstance(error, StoreUnavailable):
            return True
        error = error.__cause__
    return False


class Storage(Hashable, Protocol):
    """Errors are OSError; FileNotFoundError for a key that does not exist."""

    @property
    def root(self) -> Path:
        """The local folder, with everything that is not in the storage: caches, inbox, keys, logs."""

    @property
    def shared(self) -> bool:
        """Whether programs on other machines write to the storage: no lock protects a sequence of calls then."""

    def get(self, key: str) -> bytes: ...

    def find(self, key: str) -> Stored | None:
        """Size and time of a value; None if the key does not exist."""

    def prefetch(self, keys: Iterable[str]) -> None:
        """A hint that these values, which are written once, are about to be read."""

    def put(self, key: str, data: bytes) -> None:
        """Store a value, whatever the key held before. For values that any writer may replace."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store a value under a new key. False, and nothing is written, if the key exists."""

    def compare_and_set(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Replace `expected` (None: the key does not exist) by `data`. False, and nothing is written, if it differs.

        Replacing a value by itself renews its time.
        """

    def list(self, prefix: str) -> Iterator[Stored]:
        """The values whose keys begin with `prefix`, in no order."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete values; keys that do not exist are ignored."""

    def local_path(self, key: str) -> Path:
        """A local file with a value whose key contains its sha256, for libraries that read files."""

    def location(self, key: str) -> str:
        """The place of a value, for people."""

    def locked(self, name: str) -> AbstractContextManager[object]:
        """Exclude other processes that ask for the lock `name`; on a shared storage it excludes no process."""

    def temporaries(self, prefixes: Iterable[str]) -> Iterator[Path]:
        """Temporary files and folders, for a caller that knows that no process writes under these prefixes."""

    def observe(self, observer: Observer) -> None:
        """Call `observer` after every request to a store on another machine."""

    def drop_copies(self, keys: Iterable[str]) -> None:
        """Remove local copies of values that another process has deleted."""
