"""GET /pulse of a real server."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest

from service.inference.metrics import QUANTILES
from tests.support.servers import RunningServer, known_image, learned_folder, novel_image, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    data = learned_folder(tmp_path_factory.mktemp("pulse") / "robot")
    with running_server(data, threads=1) as running:
        yield running


def test_traffic_is_counted_to_the_last_image(server: RunningServer) -> None:
    before = server.get("/pulse").json()
    answers = [server.post("/predict", content=known_image(f"class {n % 5}", n)).json() for n in range(10)]
    answers += [server.post("/predict", content=novel_image(n)).json() for n in range(5)]
    several = [("images", known_image("class 0")), ("images", b"none"), ("images", novel_image(9))]
    answers.append(server.post("/predict", files=several).json())
    assert server.post("/predict", content=b"no image").status_code == 415
    broken = [("images", b"none"), ("images", known_image("class 0")[:50])]
    assert server.post("/predict", files=broken).status_code == 415
    assert server.post("/predict?version=99", content=known_image("class 0")).status_code == 404  # counts no image

    entries = [entry for answer in answers for entry in answer["predictions"]]
    novel = sum(entry.get("novel", False) for entry in entries)
    read = server.get("/pulse").json()
    assert before["known"] + before["novel"] + before["errors"] == 0
    assert (read["known"], read["novel"], read["errors"]) == (17 - novel, novel, 1 + 1 + 2)
    assert sum(read["scores"]) == 17
    bins = [bisect_left(QUANTILES, entry["calibrated_score"]) for entry in entries if "id" in entry]
    assert read["scores"] == [bins.count(place) for place in range(len(QUANTILES))]
    assert sum(bucket["known"] + bucket["novel"] for bucket in read["buckets"]) == 17
    assert 0 < read["p50"] <= read["p99"] < 10
    assert [(swap["previous"], swap["version"]) for swap in read["swaps"]] == [(0, 3)]


def test_a_roll_back_is_listed(server: RunningServer) -> None:
    assert server.post("/versions/2/activate").status_code == 200
    read = server.get("/pulse").json()
    assert (read["version"], read["swaps"][-1]["previous"], read["swaps"][-1]["version"]) == (2, 3, 2)
    assert read["swaps"][-1]["time"] == read["since"]


@pytest.mark.parametrize("minutes", ["0", "16", "x"])
def test_a_window_that_is_not_kept_is_refused(server: RunningServer, minutes: str) -> None:
    assert server.get(f"/pulse?minutes={minutes}").json()["code"] == "invalid"


def test_the_pulse_needs_a_key(tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1, keys="a:predict:aaaaaaaa-secret-of-a-robot") as server:
        assert server.get("/pulse").status_code == 401
        assert server.get("/pulse", headers={"X-API-Key": "aaaaaaaa-secret-of-a-robot"}).status_code == 200
