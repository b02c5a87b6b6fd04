"""The storage in an object store: S3 and everything that speaks its protocol, Google Cloud Storage, Azure.

**Conditional writes decide between writers.** `put_if_absent` is `If-None-Match: *`, `compare_and_set` is `If-Match`
with the ETag of the expected value. There are no locks: a store that ignores conditions is refused when it is opened.
An ETag may be a hash of the content, so a value that must not return to an earlier state contains a counter.

Requests that fail without an answer are repeated for `RETRY_SECONDS`. If a conditional write was perhaps done by the
first of several attempts, the value in the store tells whose write it was.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from errno import EACCES, ENOENT, ENXIO, EREMOTEIO
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import ObjectStore as Client
from obstore.store import from_url

from models.backoff import Backoff
from models.errors import StoreError
from models.files import make_folder, sha256_bytes
from models.storage.interface import Observer, Operation, Outcome, Stored, StoreUnavailable
from models.storage.object_cache import ObjectCache, content_hash
from models.storage.self_test import State, check_conditions

log = logging.getLogger(__name__)
T = TypeVar("T")

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
RETRY_SECONDS = 20.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
CONNECT_SECONDS, READ_SECONDS, REQUEST_SECONDS = 5, 15, 300
# Values that are written once, under numbers that are not used again; small and read often.
WRITE_ONCE = ("versions/", "promotions/", "erasures/")
WRITE_ONCE_BYTES = 256 * 2**20
PARALLEL_READS = 16
_CONDITION_FAILED = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


def open_object_store(url: str, root: Path, copies: ObjectCache, *, test: bool = True) -> ObjectStorage:
    """The store at `url`, tested; StoreError if it cannot be used."""
    if url.partition("://")[0] not in SCHEMES:
        raise StoreError(f"OPENWORLD_STORE names {_host(url)}: give the URL of a bucket, like s3://bucket/prefix")
    client_options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=READ_SECONDS),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
    }
    if any(os.environ.get(name, "").startswith("http://") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")):
        client_options["allow_http"] = True  # as the endpoint says
    try:
        # Repeated here, not by the library: only this code knows what a repeated conditional write means.
        client = from_url(url, client_options=client_options, retry_config={"max_retries": 0})  # type: ignore[call-overload]
        make_folder(root)
        storage = ObjectStorage(client, url, root, copies)
        if test:
            check_conditions(storage)
    except (exceptions.BaseError, ValueError) as error:
        raise StoreError(f"the object store {url} cannot be opened: {_first_line(error)}") from error
    except OSError as error:
        raise StoreError(f"the object store {url} cannot be used: {error.strerror or error}") from error
    return storage


class ObjectStorage:
    """A `Storage` in a bucket, with verified copies of objects that never change in the data folder. Thread-safe."""

    shared = True

    def __init__(
        self, client: Client, url: str, root: Path, copies: ObjectCache, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._client, self._url, self.root = client, url.rstrip("/"), root
        self._retry_seconds = retry_seconds
        self._copies = copies
        self._observer: Observer = lambda operation, outcome, seconds: None
        self._once: dict[str, bytes] = {}
        self._once_bytes = 0

    def __repr__(self) -> str:
        return f"ObjectStorage({self._url!r})"

    def location(self, key: str) -> str:
        return f"{self._url}/{key}" if key else self._url

    # Reading

    def get(self, key: str) -> bytes:
        sha256 = content_hash(key)
        if sha256 is not None:
            return self._copies.get(key, sha256) or self._fetch_verified(key, sha256)
        if (known := self._once.get(key)) is not None:
            return known
        data = self.fetch(key)[0]
        if key.startswith(WRITE_ONCE):
            self._remember(key, data)
        return data

    def local_path(self, key: str) -> Path:
        sha256 = content_hash(key)
        if sha256 is None:
            raise ValueError(f"{key} has no local copy: its name contains no hash")
        return self._copies.file(key, sha256, lambda: self.fetch(key)[0])

    def prefetch(self, keys: Iterable[str]) -> None:
        unknown = [key for key in keys if key not in self._once and key.startswith(WRITE_ONCE)]
        if len(unknown) > 1:
            with ThreadPoolExecutor(PARALLEL_READS) as threads:
                for _ in threads.map(self._get_or_none, unknown):
                    pass

    def _get_or_none(self, key: str) -> bytes | None:
        try:
            return self.get(key)
        except FileNotFoundError:
            return None

    def find(self, key: str) -> Stored | None:
        try:
            found = self._call(key, lambda: self._head(key))
        except FileNotFoundError:
            return None
        return Stored(key, found["size"], found["last_modified"].timestamp())

    def list(self, prefix: str) -> Iterator[Stored]:
        folder, last, backoff, since = prefix.rpartition("/")[0], None, self._backoff(), time.monotonic()
        while True:
            try:
                chunks = obstore.list(self._client, folder or None, offset=last)
                while chunk := self._request("list", lambda chunks=chunks: next(chunks, None)):  # type: ignore[misc]
                    for found in chunk:
                        last = found["path"]
                        if last.startswith(prefix):
                            yield Stored(last, found["size"], found["last_modified"].timestamp())
                    since = time.monotonic()
                return
            except exceptions.BaseError as error:
                self._pause_after(error, prefix, since, backoff)

    def _fetch_verified(self, key: str, sha256: str) -> bytes:
        """The bytes in the store; if they are damaged, the caller finds it out, as with every storage."""
        data = self.fetch(key)[0]
        if sha256_bytes(data) == sha256:
            self._copies.put(key, data)
        return data

    def fetch(self, key: str) -> tuple[bytes, State]:
        """A value, and what identifies its present state."""
        return self._call(key, lambda: self._fetch(key))

    def _fetch(self, key: str) -> tuple[bytes, State]:
        def get() -> tuple[bytes, Mapping[str, Any]]:
            found = obstore.get(self._client, key)
            return bytes(found.bytes()), found.meta

        data, meta = self._request("get", get)
        return data, {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}

    def _head(self, key: str) -> Mapping[str, Any]:
        return self._request("head", lambda: obstore.head(self._client, key))

    def _remember(self, key: str, data: bytes) -> None:
        if self._once_bytes > WRITE_ONCE_BYTES:
            self._once, self._once_bytes = {}, 0
        self._once[key] = data
        self._once_bytes += len(data)

    # Writing

    def put(self, key: str, data: bytes) -> None:
        self._call(key, lambda: self._put(key, data, "overwrite"))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        attempts = 0

        def create() -> bool:
            nonlocal attempts
            attempts += 1
            with suppress(*_CONDITION_FAILED):
                self._put(key, data, "create")
                return True
            if attempts > 1:  # an earlier attempt may have succeeded without an answer
                return self._fetch(key)[0] == data
            self._head(key)  # FileNotFoundError: a conflict of two writers may leave no value at all
            return False

        since, backoff = time.monotonic(), self._backoff()
        while True:
            try:
                return self._call(key, create)
            except FileNotFoundError:
                conflict = exceptions.PreconditionError("it says that the key exists, and that it does not")
                self._pause_after(conflict, key, since, backoff)

    def compare_and_set(self, key: str, expected: bytes | None, data: bytes) -> bool:
        if expected is None:
            return self.put_if_absent(key, data)
        attempts = 0

        def replace() -> bool:
            nonlocal attempts
            attempts += 1
            value, state = self._fetch(key)
            if value != expected:
                return attempts > 1 and value == data  # by an earlier attempt that got no answer
            return self._replace(key, state, data)

        try:
            return self._call(key, replace)
        except FileNotFoundError:
            return False

    def replace(self, key: str, state: State, data: bytes) -> bool:
        """Replace a value that is in a known state; False if it is not in this state."""
        return self._call(key, lambda: self._replace(key, state, data))

    def _replace(self, key: str, state: State, data: bytes) -> bool:
        try:
            self._put(key, data, state)
        except _CONDITION_FAILED:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if keys:
            try:
                self._call(keys[0], lambda: self._request("delete", lambda: obstore.delete(self._client, keys)))
            except FileNotFoundError:  # some stores refuse to delete several keys if one of them does not exist
                for key in keys:
                    with suppress(FileNotFoundError):
                        self._call(key, partial(self._request, "delete", partial(obstore.delete, self._client, key)))
        self.drop_copies(keys)

    def drop_copies(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._once.pop(key, None)
            self._copies.remove([key])

    def locked(self, name: str) -> AbstractContextManager[object]:
        """Conditional writes decide between writers."""
        return nullcontext()

    def temporaries(self, prefixes: Iterable[str]) -> Iterator[Path]:
        """A write is complete or absent without them."""
        return iter(())

    def _put(self, key: str, data: bytes, mode: Any) -> None:
        try:
            self._request("put", lambda: obstore.put(self._client, key, data, mode=mode, use_multipart=False))
        except FileNotFoundError as error:  # a value needs no folder, but a bucket
            raise OSError(ENXIO, "there is no such bucket: create it first", self._url) from error

    # Errors and repetition

    def observe(self, observer: Observer) -> None:
        self._observer = observer

    def _request(self, operation: Operation, request: Callable[[], T]) -> T:
        """The result of one request, which is reported to the observer."""
        started, outcome = time.perf_counter(), _outcome_of(None)
        try:
            return request()
        except Exception as error:
            outcome = _outcome_of(error)
            raise
        finally:
            self._observer(operation, outcome, time.perf_counter() - started)

    def _call(self, key: str, request: Callable[[], T]) -> T:
        """The result of a request, repeated while the store does not answer it."""
        since, backoff = time.monotonic(), self._backoff()
        while True:
            try:
                return request()
            except FileNotFoundError as error:
                raise FileNotFoundError(ENOENT, os.strerror(ENOENT), self.location(key)) from error
            except exceptions.BaseError as error:
                self._pause_after(error, key, since, backoff)

    def _backoff(self) -> Backoff:
        return Backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)

    def _pause_after(self, error: Exception, key: str, since: float, backoff: Backoff) -> None:
        """Wait before the next attempt; OSError if another attempt makes no sense."""
        message = _first_line(error)
        if isinstance(error, _REFUSED):
            raise PermissionError(EACCES, f"the object store refuses access ({message})", self.location(key)) from error
        if time.monotonic() - since >= self._retry_seconds:
            raise StoreUnavailable(
                EREMOTEIO, f"the object store does not answer ({message})", self.location(key)
            ) from error
        if backoff.failures == 0:
            log.warning("the object store does not answer, trying again: %s", message)
        time.sleep(backoff.next())


def _outcome_of(error: Exception | None) -> Outcome:
    if error is None:
        return "ok"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, _CONDITION_FAILED):
        return "conflict"
    return "refused" if isinstance(error, _REFUSED) else "failed"


def _host(url: str) -> str:
    """Scheme and host of a URL: the rest may contain secrets."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "no host"
    return repr(f"{parts.scheme}://{parts.hostname}") if parts.hostname else "no host"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
