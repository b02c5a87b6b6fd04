"""Erasing an image removes every copy: store, inbox, thumbnails and recent images, in all servers of a folder."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from models.files import sha256_bytes
from models.images import DEFAULT_LIMITS
from models.storage import LocalFiles
from openworld.check import check_folder
from service.erasure import Erasure
from service.http.auth import ANONYMOUS
from service.inbox import AddResult, Inbox, Sighting, Thumbnails
from service.inference.metrics import Metrics
from service.inference.recent_predictions import RecentPredictions
from service.inference.recorder import Recorder
from service.routes.novelties import report
from service.wire.novelties import ReportedPredictions
from tasks.images import FeatureCache, ImageStore, record_erasure
from tests.service.inference.test_recorder import answer
from tests.support.images import make_image
from tests.support.inbox import Clock, open_inbox, sighting
from tests.support.metrics import series
from tests.support.servers import RunningServer, learned_folder, novel_image, running_server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RunningServer, RunningServer]]:
    """A data folder, the server with its inbox, and another one."""
    folder = tmp_path_factory.mktemp("erasure")
    data = learned_folder(folder / "robot")
    with running_server(data, folder / "first.log") as first, running_server(data, folder / "second.log") as second:
        yield data, first, second


def predict(server: RunningServer, data: bytes) -> str:
    return str(server.post("/predict", content=data).json()["predictions"][0]["id"])


def remembered(server: RunningServer, prediction: str) -> bool:
    """Whether the server still has the image of a prediction."""
    reported = server.post("/novelties", json={"prediction_ids": [prediction]})
    return reported.status_code == 200


def test_every_server_of_the_folder_erases_its_copies(servers: tuple[Path, RunningServer, RunningServer]) -> None:
    data, first, second = servers
    image = novel_image(1)
    sha256 = sha256_bytes(image)
    ImageStore(data).put(image)
    FeatureCache(data, "b" * 64, ImageStore(data), 10**6).put("tokens", {sha256: np.ones((1, 4), np.float32)})
    assert len(list(data.glob(f"cache/*/*/{sha256}"))) == 1
    kept = predict(first, image)
    wait_until(lambda: first.get(f"/novelties/{sha256}").status_code == 200)
    assert first.get(f"/novelties/{sha256}/thumbnail").status_code == 200
    # The other server has neither the inbox nor this prediction.
    erased = httpx.delete(f"{second.url}/images/{sha256}", timeout=30).json()
    assert (erased["images"], erased["novelties"]) == (1, 1)
    assert any("memory of other servers" in sentence for sentence in erased["remains"])
    wait_until(lambda: first.get(f"/novelties/{sha256}").status_code == 404)
    assert not remembered(first, kept)
    assert first.get(f"/novelties/{sha256}/thumbnail").status_code == 404
    assert not list(data.rglob(sha256))
    # What a robot sends again right after the erasure is answered, but not kept.
    again = predict(first, image)
    assert not remembered(first, again)
    assert check_folder(data, None).problems == []


def test_a_deleted_novelty_leaves_the_memory_of_other_servers(
    servers: tuple[Path, RunningServer, RunningServer],
) -> None:
    data, first, second = servers
    image, other = novel_image(2), novel_image(5)
    predict(first, image)
    erased, kept = predict(second, image), predict(second, other)
    wait_until(lambda: first.get(f"/novelties/{sha256_bytes(image)}").status_code == 200)
    assert httpx.delete(f"{first.url}/novelties/{sha256_bytes(image)}", timeout=30).status_code == 204

    def follows() -> bool:
        predict(second, image)
        return second.metric("openworld_novelties_dropped_total", reason="erased") >= 1

    wait_until(follows)
    # The second server shows what it remembers after it has taken over the inbox.
    first.stop()
    wait_until(lambda: second.get("/novelties").status_code == 200)
    assert remembered(second, kept)
    assert not remembered(second, erased)
    assert check_folder(data, None).problems == []


def test_an_interrupted_erasure_is_completed_at_the_next_start(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    image, again = novel_image(3), novel_image(4)
    with closing(Inbox(data)) as inbox:
        inbox.add(sighting(image))
    for one in (image, again):
        sha256 = ImageStore(data).put(one)
        os.utime(data / "images" / sha256[:2] / sha256, (0, 0))
    record_erasure(data, [sha256_bytes(image), sha256_bytes(again)], "operator")  # and then the server was killed
    ImageStore(data).put(again)  # submitted again since
    with running_server(data) as server:
        assert server.get(f"/novelties/{sha256_bytes(image)}").status_code == 404
        wait_until(lambda: sha256_bytes(image) not in ImageStore(data))
        assert sha256_bytes(again) in ImageStore(data)
        assert check_folder(data, None).problems == []


def test_a_novelty_that_was_seen_again_after_its_erasure_stays(tmp_path: Path, clock: Clock) -> None:
    image = make_image(1)
    with open_inbox(tmp_path, clock) as inbox:
        inbox.add(sighting(image))
        assert inbox.delete_erased({sha256_bytes(image): clock.now - 1}) == 0
        assert inbox.delete_erased({sha256_bytes(image): clock.now + 1}) == 1
        assert inbox.delete_erased({sha256_bytes(image): clock.now + 1}) == 0


def test_a_thumbnail_that_is_computed_during_the_erasure_is_not_kept() -> None:
    data, reading, go_on = make_image(1), threading.Event(), threading.Event()

    def read(id: str) -> bytes:
        reading.set()
        assert go_on.wait(10)
        return data

    async def erase_while_reading() -> int:
        thumbnails = Thumbnails(DEFAULT_LIMITS)
        computing = asyncio.create_task(thumbnails.get("a", 64, read))
        await asyncio.to_thread(reading.wait, 10)
        thumbnails.remove("a")
        go_on.set()
        await computing
        kept = len(thumbnails._cache)
        thumbnails.close()
        return kept

    assert asyncio.run(erase_while_reading()) == 0


def test_a_recent_prediction_cannot_be_reported_between_the_steps_of_an_erasure(tmp_path: Path) -> None:
    recent, image = RecentPredictions(), make_image(1)
    recorder = Recorder(Metrics(), recent)
    recorder.record(image, answer(novel=False), "a", 1, "robot")

    class WatchedInbox:
        def delete(self, sha256s: Collection[str]) -> int:
            assert recent.get("a") is None
            return 0

    inbox: Any = SimpleNamespace(erase=WatchedInbox().delete)
    erasure = Erasure(LocalFiles(tmp_path), recorder, recent, inbox, Thumbnails(DEFAULT_LIMITS), 60)
    assert asyncio.run(erasure.erase([sha256_bytes(image)])) == (0, 1)


def test_an_image_that_is_reported_during_its_erasure_does_not_return() -> None:
    sighted = sighting(make_image(1))
    recorder, erased = Recorder(Metrics(), RecentPredictions()), list[str]()

    class ErasedMeanwhile:
        def add(self, one: Sighting, requested: bool) -> AddResult:
            recorder.erase([sha256_bytes(one.data)], 60)
            return AddResult("new", sha256_bytes(one.data))

    async def erase(sha256s: Collection[str]) -> None:
        erased.extend(sha256s)

    container: Any = SimpleNamespace(
        recent=SimpleNamespace(get={sighted.prediction_id: sighted}.get),
        recorder=recorder,
        erasure=SimpleNamespace(erase=erase),
    )
    request: Any = SimpleNamespace(scope={})
    body = ReportedPredictions(prediction_ids=[sighted.prediction_id])
    asyncio.run(report(request, container, ANONYMOUS, ErasedMeanwhile(), body))  # type: ignore[arg-type]
    assert erased == [sha256_bytes(sighted.data)]


def test_a_request_that_began_before_the_erasure_records_nothing() -> None:
    metrics, recent, image = Metrics(), RecentPredictions(), make_image(1)
    recorder = Recorder(metrics, recent)
    recorder.erase([sha256_bytes(image)], seconds=60)
    recorder.record(image, answer(novel=True), "a", 1, "robot")
    recorder.record(make_image(2), answer(novel=True), "b", 1, "robot")
    assert (recent.get("a"), recent.get("b") is not None) == (None, True)
    assert series(metrics.text().decode(), "openworld_novelties_dropped_total")[("erased",)] == 1
    recorder.erase([sha256_bytes(image)], seconds=-1)
    recorder.record(image, answer(novel=True), "c", 1, "robot")
    assert recent.get("c") is not None


@pytest.fixture
def clock() -> Clock:
    return Clock()
