"""The promise of a data folder that keeps features or statistics: when a task has ended, no copy of its images remains.

Every file of the folder and every value of Redis is searched for the bytes of each taught image, and of its features if
the folder keeps statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from models.files import sha256_bytes
from models.versions.contents import PROVISIONAL
from models.versions.keep import Keep, recorded_keep
from models.versions.store import VersionStore
from openworld.cli import main
from tasks.images import FeatureStore, ImageStore
from tests.support.kept_features import cnn_folder, converted_folder, feature_vectors, places_of
from tests.support.learning_loop import Loop, batch, wait_for_death
from tests.support.redis_servers import RedisServer
from tests.support.settings import variables
from tests.support.waiting import wait_until
from trainer.learning.memory import Samples


@contextmanager
def kept_loop(root: Path, keep: Keep = "features", **settings: str) -> Iterator[Loop]:
    data = cnn_folder(root / "robot", keep) if keep == "statistics" else converted_folder(root / "robot")
    with RedisServer(data / "redis") as redis:
        running = Loop(data, redis, variables(**settings))
        try:
            yield running
            running.check()
        finally:
            running.stop()


def submitted(running: Loop, *names: str, **more: int) -> tuple[str, list[bytes]]:
    """The id of a task, and its images."""
    files = batch(*names, **more)
    response = running.submit(files)
    assert response.status_code == 202, response.text
    return str(response.json()["id"]), [data for _, (_, data) in files]


def found(running: Loop, parts: list[bytes]) -> list[str]:
    return places_of(parts, running.data, running.redis)


def wait_until_gone(running: Loop, images: list[bytes]) -> None:
    kept = recorded_keep(running.data)
    vectors = feature_vectors(running.data, images) if kept == "statistics" else []
    wait_until(lambda: found(running, [*images, *vectors]) == [], 60)


def retried(running: Loop, id: str) -> httpx.Response:
    return httpx.post(f"{running.url}/tasks/{id}/retry", timeout=30)


@pytest.mark.parametrize(
    ("keep", "shared"),
    [("features", ""), ("features", "recent,inbox"), ("statistics", "")],
    ids=["features, one server", "features, shared state", "statistics"],
)
def test_images_are_gone_after_publishing_failure_and_cancellation(tmp_path: Path, keep: Keep, shared: str) -> None:
    with kept_loop(tmp_path, keep, **({"shared": shared} if shared else {})) as running:
        running.start("serve")
        images = [data for _, (_, data) in batch("fresh", "fresh too")]
        predicted = httpx.post(f"{running.url}/predict", files=[("images", data) for data in images], timeout=30)
        assert predicted.status_code == 200, predicted.text
        # They are in the inbox or among the recent images, then in the image store.
        id, images = submitted(running, "fresh", "fresh too")
        assert found(running, images)
        trainer = running.start("train")
        assert running.wait_until_ended(id)["state"] == "published"
        assert not any(sha256_bytes(data) in ImageStore(running.data) for data in images)  # at once
        wait_until_gone(running, images)
        store = VersionStore(running.data)
        current = store.current_manifest()
        assert current is not None
        assert current.keep == keep
        assert Samples.from_json(store.samples(current.version)).keys <= {
            one.sha256 for one in FeatureStore(store.root)
        }

        failed, again = submitted(running, "fresh", images=5)  # every image is learned already
        assert running.wait_until_ended(failed)["state"] == "failed"
        wait_until_gone(running, again)
        gone = retried(running, failed)
        assert (gone.status_code, gone.json()["code"]) == (410, "images_discarded")
        assert "submit the images again" in gone.json()["detail"]

        trainer.terminate()
        trainer.wait(30)
        cancelled, more = submitted(running, "more")
        assert found(running, more)
        assert (
            main(["backup", str(tmp_path / "copy"), "--data", str(running.data), "--redis-url", running.redis.url]) == 0
        )
        assert places_of(more, tmp_path / "copy") == []
        assert (tmp_path / "copy" / "data" / "features").is_dir() == (keep == "features")
        assert httpx.post(f"{running.url}/tasks/{cancelled}/cancel", timeout=30).json()["state"] == "cancelled"
        wait_until_gone(running, more)
        assert retried(running, cancelled).status_code == 410
        # The batch is learned if its images are submitted again.
        running.start("train")
        assert submitted(running, "more") == (cancelled, more)
        assert running.wait_until_ended(cancelled)["state"] == "published"
        wait_until_gone(running, [*images, *again, *more])


@pytest.mark.parametrize(
    ("keep", "step"),
    [
        ("features", "mid-epoch"),
        ("features", "promoted"),
        ("features", "before the acknowledgement"),
        ("statistics", "mid-epoch"),
        ("statistics", "promoted"),
    ],
)
def test_images_are_gone_after_a_trainer_was_killed_and_started_again(tmp_path: Path, keep: Keep, step: str) -> None:
    with kept_loop(tmp_path, keep, provisional="on") as running:
        running.start("serve")
        id, images = submitted(running, "fresh", "fresh too")
        wait_for_death(running.start("train", fault=step))
        assert found(running, images) or step == "before the acknowledgement"
        if keep == "statistics":  # features are in memory only, at any time
            assert found(running, feature_vectors(running.data, images)) == []
        running.start("train")
        assert running.wait_until_ended(id)["state"] == "published"
        assert len(running.versions_of(id)) == 1
        wait_until_gone(running, images)


def test_a_pending_task_keeps_features_only_and_a_cancelled_one_nothing(tmp_path: Path) -> None:
    with kept_loop(tmp_path, provisional="on") as running:
        running.start("serve")
        running.queue.pause(True)
        running.start("train")
        id, images = submitted(running, "fresh", "fresh too")
        wait_until(lambda: running.task(id)["provisional"] is not None, 60)
        features = FeatureStore(running.data)
        assert all(sha256_bytes(data) in features for data in images)
        assert httpx.post(f"{running.url}/tasks/{id}/cancel", timeout=30).json()["state"] == "cancelled"
        wait_until_gone(running, images)
        wait_until(lambda: not any(sha256_bytes(data) in features for data in images), 30)


def test_the_sums_of_a_cancelled_task_are_gone_after_a_kill_and_its_version_cannot_be_activated(tmp_path: Path) -> None:
    with kept_loop(tmp_path, "statistics", provisional="on") as running:
        running.start("serve")
        running.queue.pause(True)
        trainer = running.start("train")
        id, images = submitted(running, "fresh", "fresh too")
        wait_until(lambda: running.task(id)["provisional"] == 3, 60)
        sums = VersionStore(running.data).content_path(3, PROVISIONAL).read_bytes()
        trainer.kill()
        trainer.wait(30)
        assert httpx.post(f"{running.url}/tasks/{id}/cancel", timeout=30).json()["state"] == "cancelled"
        assert found(running, [sums])
        running.start("train")
        wait_until(lambda: found(running, [sums]) == [], 60)
        wait_until_gone(running, images)
        wait_until(lambda: httpx.get(f"{running.url}/versions", timeout=30).json()["serving"] == 4, 10)
        states = {
            version["version"]: (version["state"], version["reason"])
            for version in httpx.get(f"{running.url}/versions", timeout=30).json()["versions"]
        }
        assert states[3][0] == "discarded"
        assert "it was provisional" in states[3][1]
        assert (states[1][0], states[2][0], states[4][0]) == ("available", "available", "serving")
        refused = httpx.post(f"{running.url}/versions/3/activate", timeout=30)
        assert (refused.status_code, refused.json()["code"]) == (409, "version_unusable")
        assert "its contents are removed" in refused.json()["detail"]
        assert httpx.get(f"{running.url}/versions/3", timeout=30).json()["reference"] == []
        assert httpx.post(f"{running.url}/versions/2/activate", timeout=30).status_code == 200


def test_images_that_are_in_sums_only_cannot_be_erased_and_few_are_not_summed(tmp_path: Path) -> None:
    with kept_loop(tmp_path, "statistics") as running:
        running.start("serve")
        store = VersionStore(running.data)
        sha256 = next(iter(Samples.from_json(store.samples(2)).seen.values()))[0]
        for answer in (
            httpx.get(f"{running.url}/images/{sha256}", timeout=30),
            httpx.delete(f"{running.url}/images/{sha256}?force=true", timeout=30),
        ):
            assert (answer.status_code, answer.json()["code"]) == (410, "images_discarded")
            assert "the sums of version 2 contain it and cannot be changed without it" in answer.json()["detail"]
        few = running.submit(batch("fresh", images=2))
        assert few.status_code == 422
        assert "class 'fresh' gains 2 of at least 5 images" in few.text
        shown = httpx.get(f"{running.url}/versions/2", timeout=30).json()
        assert (shown["keep"], shown["method"], shown["drawn"] > 0) == ("statistics", "hat-csi", True)


def test_a_server_states_what_the_folder_keeps(tmp_path: Path) -> None:
    with kept_loop(tmp_path) as running:
        running.start("serve")
        versions = httpx.get(f"{running.url}/versions", timeout=30).json()
        assert (versions["keep"], versions["versions"][-1]["keep"]) == ("features", "features")
        assert versions["disk"]["features"] > 0 == versions["disk"]["images"]
        assert httpx.get(f"{running.url}/me", timeout=30).json()["keep"] == "features"
        assert httpx.get(f"{running.url}/versions/{versions['serving']}", timeout=30).json()["keep"] == "features"
        sha256 = next(iter(FeatureStore(running.data))).sha256
        shown = httpx.get(f"{running.url}/images/{sha256}/thumbnail", timeout=30)
        assert (shown.status_code, shown.json()["code"]) == (410, "images_discarded")
        assert "not kept in this mode" in shown.json()["detail"]
        uses = httpx.get(f"{running.url}/images/{sha256}", timeout=30).json()
        assert (uses["stored"], uses["features"]) == (False, True)
        erased = httpx.delete(f"{running.url}/images/{sha256}?force=true", timeout=30)
        assert erased.json()["images"] == 1
        assert sha256 not in FeatureStore(running.data)
