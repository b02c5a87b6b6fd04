"""`openworld convert`: from images to features, never back, and after a kill again."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from models.errors import CorruptVersion
from models.versions.contents import SAMPLES, content_key
from models.versions.folder_id import folder_id
from models.versions.keep import recorded_keep
from models.versions.store import VersionStore
from openworld.check import check_folder
from openworld.cli import main
from service.inbox import Inbox
from tasks.discarding import record_queue
from tasks.images import FeatureStore, ImageStore, cache_files, erased_images
from tasks.queue import TaskQueue, key_prefix
from tests.support.inbox import sighting
from tests.support.kept_features import convert_tiny, convert_until_killed, converted_folder, places_of
from tests.support.redis_servers import RedisServer, client_of
from tests.support.servers import learned_folder, novel_image
from tests.support.version_stores import flip_byte
from trainer.learning.memory import Samples

pytestmark = pytest.mark.usefixtures("restore_torch_settings")


def stored_images(data: Path) -> dict[str, bytes]:
    images = ImageStore(data)
    return {image.sha256: images.read(image.sha256) for image in images}


def test_a_converted_folder_has_features_in_place_of_every_image(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    images = stored_images(data)
    before = VersionStore(data).current_manifest()
    converted = convert_tiny(data)
    store = VersionStore(data)
    named = {key for n in (1, 2, 3) for key in Samples.from_json(store.samples(n)).keys}
    assert converted == (len(named), frozenset(images), 0, (), 0)  # earlier versions can be rolled back to
    assert {found.sha256 for found in FeatureStore(data)} == named
    assert {file.sha256 for file in cache_files(data)} <= named
    assert places_of(list(images.values()), data) == []
    assert erased_images(data) == set(images)
    assert erased_images(data, with_features=True) == set()
    after = store.current_manifest()
    assert before is not None
    assert after is not None
    assert (after.keep, after.parent, after.files) == ("features", before.version, before.files)
    assert check_folder(data, None).problems == []


def test_a_folder_whose_current_version_is_damaged_is_not_converted(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    images, store = stored_images(data), VersionStore(data)
    current = store.current_manifest()
    assert current is not None
    flip_byte(data / content_key(SAMPLES, current.files[SAMPLES].sha256))
    with pytest.raises(CorruptVersion):
        convert_tiny(data)
    assert recorded_keep(data) == "images"
    assert stored_images(data) == images


def test_images_of_unfinished_tasks_stay(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    waiting = ImageStore(data).put(novel_image(1))
    assert convert_tiny(data, [waiting]).unfinished == 1
    assert [image.sha256 for image in ImageStore(data)] == [waiting]


@pytest.mark.parametrize("step", ["_store_features", "record_less", "_publish", "discard_images"])
def test_a_conversion_that_was_killed_is_completed_by_another_one(tmp_path: Path, step: str) -> None:
    data = learned_folder(tmp_path / "robot")
    images = stored_images(data)
    convert_until_killed(data, step)
    assert VersionStore(data).current() is not None
    convert_tiny(data)
    assert places_of(list(images.values()), data) == []
    assert recorded_keep(data) == "features"
    assert len(VersionStore(data).versions()) == 4
    assert check_folder(data, None).problems == []


def test_a_folder_is_not_converted_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = converted_folder(tmp_path / "robot")
    assert main(["convert", "--keep", "images", "--data", str(data)]) == 2
    assert "keeps features, and what it does not keep cannot be recovered" in capsys.readouterr().err
    assert main(["convert", "--keep", "statistics", "--data", str(data)]) == 2
    assert "or keep features" in capsys.readouterr().err  # its method replays them
    assert main(["convert", "--keep", "features", "--data", str(data)]) == 0
    assert "0 images discarded" in capsys.readouterr().out


def test_a_folder_whose_queue_is_not_known_is_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENWORLD_REDIS_URL", raising=False)
    data = learned_folder(tmp_path / "robot")
    folder_id(data)  # as a server with a queue on another machine leaves it
    images = stored_images(data)
    assert main(["convert", "--keep", "features", "--data", str(data)]) == 2
    assert "set OPENWORLD_REDIS_URL" in capsys.readouterr().err
    assert (stored_images(data), recorded_keep(data)) == (images, "images")


def test_a_folder_with_tasks_in_another_redis_server_is_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = learned_folder(tmp_path / "robot")
    prefix, images = key_prefix(folder_id(data)), stored_images(data)
    with RedisServer(tmp_path / "own") as own, RedisServer(tmp_path / "other") as other:
        with client_of(own.url) as client:
            record_queue(data, TaskQueue(client, prefix))
        assert main(["convert", "--keep", "features", "--data", str(data), "--redis-url", other.url]) == 2
    assert "another Redis server, whose tasks may need them" in capsys.readouterr().err
    assert (stored_images(data), recorded_keep(data)) == (images, "images")


def test_a_folder_with_a_running_server_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = learned_folder(tmp_path / "robot")
    inbox = Inbox(data)
    inbox.add(sighting(novel_image(1)))
    assert main(["convert", "--keep", "features", "--data", str(data)]) == 2
    assert "a server runs on" in capsys.readouterr().err
    inbox.close()
    assert recorded_keep(data) == "images"
