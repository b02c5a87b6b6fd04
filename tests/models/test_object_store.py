"""Object stores that lie, stop answering or are wrongly configured: refused or waited for, with a clear message."""

import sys
import threading
import time
from pathlib import Path

import pytest

from deploy.fleet.object_store import environment_of
from deploy.fleet.programs import free_ports
from models.errors import StoreError
from models.files import sha256_bytes
from models.storage import StoreUnavailable, is_unavailable, open_storage
from models.storage import object_store as module
from models.storage.object_cache import ObjectCache
from models.storage.object_store import ObjectStorage
from models.versions.store import VersionStore
from tests.support.object_stores import memory_storage, new_bucket, rclone_server
from tests.support.version_stores import publish

pytest.importorskip("obstore", reason="needs obstore: pip install 'openworld[scale]'")


def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rclone_server(tmp_path / "rclone") as port:
        for name, value in environment_of(port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StoreError, match=r"two trainers could overwrite .* If-None-Match is ignored"):
            open_storage(tmp_path / "data", new_bucket())
        assert open_storage(tmp_path / "data", new_bucket(), test=False).find("CURRENT") is None  # to read it only


def test_a_store_that_ignores_the_state_of_a_value_is_refused(
    seaweedfs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ObjectStorage._put

    def ignoring(self: ObjectStorage, key: str, data: bytes, mode: object) -> None:
        real(self, key, data, "overwrite" if isinstance(mode, dict) else mode)

    monkeypatch.setattr(ObjectStorage, "_put", ignoring)
    with pytest.raises(StoreError, match=r"If-Match is ignored"):
        open_storage(tmp_path / "data", new_bucket())


@pytest.mark.parametrize("url", ["bucket", "file:///tmp", "http://127.0.0.1/bucket", "memory:///"])
def test_a_url_that_names_no_bucket_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreError, match="like s3://bucket/prefix"):
        open_storage(tmp_path, url)


@pytest.mark.parametrize("rest", ["ann:hidden@host/hidden?sig=hidden", "[hidden/bucket", "host/#hidden"])
def test_a_refused_url_is_not_shown_with_its_secrets(tmp_path: Path, rest: str) -> None:
    with pytest.raises(StoreError, match=r"OPENWORLD_STORE names ('http://host'|no host)") as caught:
        open_storage(tmp_path, f"http://{rest}")
    assert "hidden" not in str(caught.value)


def test_a_store_that_contradicts_itself_about_a_key_is_asked_with_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, pauses = memory_storage(tmp_path), list[float]()
    storage._retry_seconds = 0.5

    def refuse(*arguments: object) -> None:
        raise module.exceptions.PreconditionError("it exists")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    sleep = time.sleep
    monkeypatch.setattr(ObjectStorage, "_put", refuse)
    monkeypatch.setattr(module.time, "sleep", pause)
    with pytest.raises(StoreUnavailable, match="the key exists, and that it does not"):
        storage.put_if_absent("key", b"value")
    assert 2 <= len(pauses) <= 20


def test_wrong_credentials_are_reported_at_once(
    seaweedfs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    started = time.monotonic()
    with pytest.raises(StoreError, match="refuses access"):
        open_storage(tmp_path, new_bucket())
    assert time.monotonic() - started < module.RETRY_SECONDS / 2


def test_a_bucket_that_does_not_exist_is_reported_at_once(
    seaweedfs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_bucket(*arguments: object, **more: object) -> None:
        raise FileNotFoundError("NoSuchBucket")

    monkeypatch.setattr(module.obstore, "put", no_bucket)
    with pytest.raises(StoreError, match="there is no such bucket: create it first"):
        open_storage(tmp_path, new_bucket())


def test_a_store_that_never_answers_is_an_error_that_says_so(
    seaweedfs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_bucket()
    store = VersionStore(open_storage(tmp_path / "a", url))
    publish(store, "task-1", None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    gone = open_storage(tmp_path / "b", url, test=False)
    gone._retry_seconds = 0.3  # type: ignore[attr-defined]
    for call in (lambda: gone.get("CURRENT"), lambda: gone.find("CURRENT"), lambda: list(gone.list("versions/"))):
        with pytest.raises(StoreUnavailable, match="does not answer"):
            call()
    with pytest.raises(StoreUnavailable):
        gone.compare_and_set("CURRENT", b"1\n", b"2\n")
    store.storage = gone  # an outage is not a damaged version: the lineage must not look shorter than it is
    with pytest.raises((StoreError, StoreUnavailable)) as caught:
        store.find_task("task-1")
    assert is_unavailable(caught.value)


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "models.storage.object_store")
    with pytest.raises(StoreError, match=r"needs obstore: pip install 'openworld\[scale\]'"):
        open_storage(tmp_path, "s3://bucket/prefix")


class BrokenConnections:
    """Makes the first writes get no answer, although the store has done them."""

    def __init__(self, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
        real, lock = ObjectStorage._put, threading.Lock()
        self.left = failures

        def put(storage: ObjectStorage, key: str, data: bytes, mode: object) -> None:
            real(storage, key, data, mode)
            with lock:
                self.left -= 1
                broken = self.left >= 0
            if broken:
                raise module.exceptions.GenericError("connection reset")

        monkeypatch.setattr(ObjectStorage, "_put", put)


def test_a_write_that_was_done_without_an_answer_counts_once(
    seaweedfs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(tmp_path, new_bucket())
    for failures in (1, 2):
        with monkeypatch.context() as patch:
            BrokenConnections(failures, patch)
            assert storage.put_if_absent(f"key-{failures}", b"1")
            assert not storage.put_if_absent(f"key-{failures}", b"2")
        with monkeypatch.context() as patch:
            BrokenConnections(failures, patch)
            assert storage.compare_and_set(f"key-{failures}", b"1", b"2")
            assert not storage.compare_and_set(f"key-{failures}", b"1", b"3")
        assert storage.get(f"key-{failures}") == b"2"


def test_a_damaged_object_is_not_kept_as_a_copy(seaweedfs: int, tmp_path: Path) -> None:
    storage = open_storage(tmp_path, new_bucket())
    key = f"images/ab/{sha256_bytes(b'an image')}"
    storage.put(key, b"damaged")
    assert storage.get(key) == b"damaged"  # the caller compares the hash, as with local files
    storage.put(key, b"an image")
    assert storage.get(key) == b"an image"
    storage.put(key, b"damaged again")
    assert storage.get(key) == b"an image"  # from the copy
    storage.delete([key])
    with pytest.raises(FileNotFoundError):
        storage.get(key)


def test_copies_of_values_that_another_machine_deleted_are_dropped(seaweedfs: int, tmp_path: Path) -> None:
    url = new_bucket()
    one, other = open_storage(tmp_path / "one", url), open_storage(tmp_path / "other", url)
    key = f"images/ab/{sha256_bytes(b'an image')}"
    one.put(key, b"an image")
    assert other.get(key) == b"an image"
    one.delete([key])
    other.drop_copies([key])
    with pytest.raises(FileNotFoundError):
        other.get(key)
    assert [path for path in (tmp_path / "other").rglob("*") if path.is_file()] == []


def test_the_copies_are_bounded(seaweedfs: int, tmp_path: Path) -> None:
    storage = open_storage(tmp_path, new_bucket(), cache_bytes=1000)
    for number in range(20):
        data = bytes([number]) * 90
        storage.put(f"heads/{sha256_bytes(data)}.safetensors", data)
        assert storage.get(f"heads/{sha256_bytes(data)}.safetensors") == data
    assert ObjectCache(tmp_path / "objects", 1000)._bytes <= 1000
