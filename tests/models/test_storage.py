"""The storage interface, on local files and on a real object store: no value is created twice or replaced blindly."""

import os
import threading
from pathlib import Path

import pytest

from models import files
from models.storage import LocalFiles, Storage, open_storage
from tests.support.object_stores import new_bucket


@pytest.fixture(params=["local files", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage of each kind."""
    if request.param == "local files":
        return LocalFiles(tmp_path / "data")
    request.getfixturevalue("seaweedfs")
    return open_storage(tmp_path / "data", new_bucket())


def test_a_value_is_put_once_and_read_back(storage: Storage) -> None:
    assert storage.find("a/b") is None
    assert storage.put_if_absent("a/b", b"one")
    assert not storage.put_if_absent("a/b", b"two")
    assert storage.get("a/b") == b"one"
    found = storage.find("a/b")
    assert found is not None
    assert (found.key, found.size) == ("a/b", 3)
    with pytest.raises(FileNotFoundError):
        storage.get("a/c")


def test_a_value_is_replaced_only_if_it_is_the_expected_one(storage: Storage) -> None:
    assert not storage.compare_and_set("CURRENT", b"1", b"2")
    assert storage.compare_and_set("CURRENT", None, b"1")
    assert not storage.compare_and_set("CURRENT", None, b"2")
    assert not storage.compare_and_set("CURRENT", b"0", b"2")
    assert storage.compare_and_set("CURRENT", b"1", b"2")
    assert storage.get("CURRENT") == b"2"


def test_a_value_that_any_writer_may_replace_is_put_whatever_was_there(storage: Storage) -> None:
    for value in (b"1", b"", b"2"):
        storage.put("work/task/phase", value)
        assert storage.get("work/task/phase") == value


@pytest.mark.parametrize("call", ["put_if_absent", "compare_and_set"])
def test_exactly_one_of_several_concurrent_writers_succeeds(storage: Storage, call: str) -> None:
    outcomes: dict[int, bool] = {}
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        value = str(number).encode()
        if call == "put_if_absent":
            outcomes[number] = storage.put_if_absent("a", value)
        else:
            outcomes[number] = storage.compare_and_set("a", None, value)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (number for number, won in outcomes.items() if won)
    assert storage.get("a") == str(winner).encode()


def test_values_are_listed_by_the_beginning_of_their_keys(storage: Storage) -> None:
    for key in ("tasks/ab", "tasks/ac", "tasks/b/deep", "other"):
        storage.put_if_absent(key, b"x")
    assert {found.key for found in storage.list("tasks/")} == {"tasks/ab", "tasks/ac", "tasks/b/deep"}
    assert {found.key for found in storage.list("tasks/a")} == {"tasks/ab", "tasks/ac"}
    assert "other" in {found.key for found in storage.list("")}
    assert list(storage.list("nothing/")) == []


def test_deleting_ignores_keys_that_do_not_exist(storage: Storage) -> None:
    storage.put_if_absent("a/one", b"1")
    storage.put_if_absent("a/two", b"2")
    storage.delete(["a/one", "a/none", "b/none"])
    assert [found.key for found in storage.list("a/")] == ["a/two"]
    assert storage.put_if_absent("a/one", b"again")


def test_a_value_with_its_hash_in_its_name_has_a_local_file(storage: Storage) -> None:
    key = f"graphs/{files.sha256_bytes(b'a graph')}.onnx"
    with pytest.raises(FileNotFoundError):
        storage.local_path(key).read_bytes()
    storage.put(key, b"a graph")
    assert storage.local_path(key).read_bytes() == b"a graph"


# Local files only


@pytest.fixture
def local(tmp_path: Path) -> LocalFiles:
    return LocalFiles(tmp_path / "data")


def test_replacing_a_value_by_itself_renews_its_time(local: LocalFiles) -> None:
    local.put_if_absent("a", b"1")
    os.utime(local.root / "a", (0, 0))
    assert local.compare_and_set("a", b"1", b"1")
    found = local.find("a")
    assert found is not None
    assert found.time > 0


def test_a_file_that_is_being_written_is_not_listed(local: LocalFiles) -> None:
    local.put_if_absent("tasks/ab", b"x")
    (local.root / "tasks" / ".ab.0123.tmp").write_bytes(b"being written")
    assert [found.key for found in local.list("tasks/")] == ["tasks/ab"]


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_failed_write_leaves_nothing(local: LocalFiles, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    local.put_if_absent("a/first", b"1")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        with pytest.raises(OSError, match="No space"):
            local.put_if_absent("a/second", b"2")
    assert [path.name for path in (local.root / "a").iterdir()] == ["first"]


def test_a_file_system_without_hard_links_is_supported(local: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(files.NO_LINKS[0], "Operation not permitted")

    monkeypatch.setattr(files.os, "link", refuse)
    assert local.put_if_absent("a", b"1")
    assert not local.put_if_absent("a", b"2")
    assert local.get("a") == b"1"
