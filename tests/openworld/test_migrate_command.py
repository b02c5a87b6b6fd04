"""`openworld migrate`: into a bucket and back, verified, interrupted and repeated."""

from pathlib import Path

import numpy as np
import pytest

from models.storage import LocalFiles, open_storage
from models.storage.object_cache import ObjectCache
from models.versions.folder_id import folder_id
from models.versions.keep import record_less
from models.versions.store import VersionStore
from openworld import migration
from openworld.cli import main
from tasks.images import FeatureStore, ImageStore, erased_images, record_erasure
from tests.support.object_stores import memory_storage, new_bucket
from tests.support.version_stores import flip_byte, publish, tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with two versions, a rejected one, a backbone, images and an erasure."""
    root = tmp_path / "robot"
    store, images = VersionStore(root), ImageStore(root)
    graph = store.add_graph(b"a graph")
    publish(store, "task-1", None, graphs={"trunk": graph})
    publish(store, "task-2", 1, graphs={"trunk": graph})
    store.activate(1, "operator", "roll back")
    for number in range(5):
        images.put(f"image {number}".encode())
    ImageStore(root, "novelties/").put(b"a novelty of the shared inbox")
    record_erasure(root, ["ab" * 32], "operator")
    folder_id(root)
    (root / "keys.json").write_text("{}")
    (root / "audit.jsonl").write_text("")
    return root


SHARED = (
    "versions",
    "promotions",
    "tasks",
    "heads",
    "samples",
    "graphs",
    "images",
    "novelties",
    "CURRENT",
    "FORMAT",
    "ID",
)


def shared(root: Path) -> dict[str, bytes | None]:
    return {name: data for name, data in tree(root).items() if name.split("/")[0] in SHARED}


def test_a_folder_moves_into_a_bucket_and_back(
    folder: Path, seaweedfs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, before = new_bucket(), tree(folder)
    assert main(["migrate", str(folder), url]) == 0
    assert "version 1 is current" in capsys.readouterr().out
    assert tree(folder) == before
    storage = open_storage(tmp_path / "machine", url)
    store = VersionStore(storage)
    assert (store.current(), store.versions()) == (1, [1, 2])
    assert [line.version for line in store.log()] == [1, 2, 1]
    assert erased_images(storage) == {"ab" * 32}
    assert storage.find("keys.json") is None
    assert publish(store, "task-3", 1) == 3  # the store is in use now
    assert main(["migrate", url, str(tmp_path / "back")]) == 0
    back = VersionStore(tmp_path / "back")
    assert (back.current(), back.load().manifest.task_id) == (3, "task-3")
    assert folder_id(tmp_path / "back") == folder_id(folder)
    assert erased_images(tmp_path / "back") == {"ab" * 32}
    assert publish(back, "task-4", 3) == 4


def test_a_copy_of_a_copy_is_the_folder(folder: Path, seaweedfs: int, tmp_path: Path) -> None:
    url = new_bucket()
    assert main(["migrate", str(folder), url]) == 0
    assert main(["migrate", url, str(tmp_path / "back")]) == 0
    assert shared(tmp_path / "back") == shared(folder)


def test_an_interrupted_migration_has_no_current_version_and_can_be_repeated(
    folder: Path, seaweedfs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, copied = new_bucket(), 0
    target = open_storage(tmp_path / "machine", url)

    def stop(count: int) -> None:
        nonlocal copied
        copied += count
        if copied == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migration.migrate(LocalFiles(folder), target, stop)
    assert VersionStore(target).current() is None
    image = next(iter(target.list("images/")))
    target.put(image.key, b"damaged since")
    assert migration.migrate(LocalFiles(folder), target) == 1
    assert VersionStore(target).load().manifest.task_id == "task-1"
    assert migration.migrate(LocalFiles(folder), target) == 1  # complete: compared again
    images = ImageStore(open_storage(tmp_path / "another", url))
    assert [len(images.read(one.sha256)) for one in images] == [7] * 5


def test_a_repeated_migration_removes_what_was_erased_in_the_source_since(folder: Path, tmp_path: Path) -> None:
    target, images = memory_storage(tmp_path / "machine"), ImageStore(folder)
    migration.migrate(LocalFiles(folder), target)
    erased, back, *kept = [image.sha256 for image in images]
    for sha256 in (erased, back):
        data = images.read(sha256)
        record_erasure(folder, [sha256], "operator")
        images.remove(sha256)
    assert images.put(data) == back  # submitted again after its erasure
    migration.migrate(LocalFiles(folder), target)
    assert {image.sha256 for image in ImageStore(target)} == {back, *kept}
    assert {erased, back} <= erased_images(target)


def test_a_folder_that_keeps_features_gives_no_image_to_the_copy_and_no_erased_features(
    folder: Path, tmp_path: Path
) -> None:
    target, images, features = memory_storage(tmp_path / "machine"), ImageStore(folder), FeatureStore(folder)
    images.erase(list(images))
    record_less(folder, "features")
    erased, back, discarded = ("aa" * 32, "bb" * 32, "cc" * 32)
    tokens = {0: np.ones((1, 4), np.float32)}
    features.put_all((sha256, tokens) for sha256 in (erased, back, discarded))
    migration.migrate(LocalFiles(folder), target)
    assert [list(ImageStore(target, prefix)) for prefix in ("", "novelties/")] == [[], []]
    assert {found.sha256 for found in FeatureStore(target)} == {erased, back, discarded}

    record_erasure(folder, [discarded], "trainer", features_kept=True)
    record_erasure(folder, [erased, back], "operator")
    features.erase([erased])  # the other one was taught again
    migration.migrate(LocalFiles(folder), target)
    assert {found.sha256 for found in FeatureStore(target)} == {back, discarded}


def test_migrating_keeps_no_local_copies_of_the_values(
    folder: Path, seaweedfs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, kept = new_bucket(), list[str]()
    monkeypatch.setattr(ObjectCache, "_write", lambda self, path, data: kept.append(path.name))
    assert main(["migrate", str(folder), url]) == 0
    assert main(["migrate", url, str(tmp_path / "back")]) == 0
    assert kept == []


def test_a_damaged_source_is_refused(folder: Path, seaweedfs: int, capsys: pytest.CaptureFixture[str]) -> None:
    flip_byte(VersionStore(folder).content_path(2, "heads"))
    assert main(["migrate", str(folder), new_bucket()]) == 2
    assert "is damaged, its bytes have changed" in capsys.readouterr().err


def test_a_target_in_use_is_refused(
    folder: Path, seaweedfs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, url = tmp_path / "other", new_bucket()
    publish(VersionStore(other), "theirs", None)
    folder_id(other)
    assert main(["migrate", str(other), url]) == 0
    assert main(["migrate", str(folder), url]) == 2
    assert "holds another data folder" in capsys.readouterr().err
    assert main(["migrate", str(tmp_path / "nothing"), new_bucket()]) == 2
    assert "there is no data folder" in capsys.readouterr().err
    assert main(["migrate", str(folder), str(folder)]) == 2
    publish(VersionStore(open_storage(tmp_path / "machine", url)), "more", 1)
    assert main(["migrate", str(other), url]) == 2
    assert "version 2 is current" in capsys.readouterr().err


def test_a_source_that_changes_meanwhile_is_reported(folder: Path, seaweedfs: int, tmp_path: Path) -> None:
    target, store = open_storage(tmp_path / "machine", new_bucket()), VersionStore(folder)

    def interfere(count: int) -> None:
        if store.current() == 1:
            store.activate(2, "operator", "during the copy")

    with pytest.raises(migration.OpenWorldError, match="stop the programs"):
        migration.migrate(LocalFiles(folder), target, interfere)
    assert VersionStore(target).current() is None
