"""The server's metrics: present, documented, exact, and bounded in number."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from models.versions.store import VersionStore
from service.inference.metrics import REJECTED, STAGES
from tests.support.metrics import families, series
from tests.support.servers import (
    RunningServer,
    known_image,
    learned_folder,
    metric_value,
    novel_image,
    running_server,
    wait_until,
)

SECRETS = {"robot": "rrrrrrrr-secret-of-a-robot", "app": "aaaaaaaa-secret-of-an-app"}
KEYS = f"robot:predict:{SECRETS['robot']},app:predict+operate:{SECRETS['app']}"

# Names, types and labels that dashboards and alerts rely on.
EXPECTED: dict[str, tuple[str, set[str]]] = {
    "requests_total": ("counter", {"route", "code"}),
    "request_duration_seconds": ("histogram", {"route"}),
    "predictions_total": ("counter", {"outcome", "version", "client"}),
    "calibrated_score": ("histogram", {"version"}),
    "stage_duration_seconds": ("histogram", {"stage"}),
    "batch_size": ("histogram", set()),
    "queue_depth": ("gauge", set()),
    "rejected_total": ("counter", {"reason"}),
    "model_info": ("gauge", {"version", "sha256"}),
    "version_novel_above": ("gauge", {"version"}),
    "model_swaps_total": ("counter", set()),
    "model_load_failures_total": ("counter", {"reason"}),
    "novelties": ("gauge", {"state"}),
}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name]}"}


@dataclass(frozen=True)
class Traffic:
    """The server's metrics after a known sequence of requests."""

    text: str

    def value(self, name: str, **labels: str) -> float:
        return metric_value(self.text, f"openworld_{name}", **labels)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("metrics") / "robot")
    with running_server(data, threads=1, keys=KEYS, poll_seconds=60) as running:
        yield running


@pytest.fixture(scope="module")
def traffic(server: RunningServer) -> Traffic:
    good = [known_image(f"class {number}") for number in range(5)]
    strange = [novel_image(number) for number in range(3)]
    with httpx.Client(base_url=server.url, timeout=30) as http:

        def predict(client: str, *images: bytes, path: str = "/predict") -> int:
            files = [("images", (str(place), image)) for place, image in enumerate(images)]
            body: dict[str, Any] = {"files": files} if len(images) > 1 else {"content": images[0]}
            return http.post(path, headers=key(client), **body).status_code

        # robot: 3 known, 2 novel, 2 unreadable; app: 5 known and 1 novel, 2 unreadable, and 2 known of version 2.
        assert [predict("robot", image) for image in (*good[:3], *strange[:2])] == [200] * 5
        assert [predict("robot", image) for image in (b"text", good[0][:50])] == [415, 422]
        assert predict("app", *good, strange[2], b"text", b"") == 200
        assert [predict("app", good[0], path="/predict?version=2") for _ in range(2)] == [200, 200]
        assert http.post("/predict", content=good[0]).status_code == 401
        assert http.post("/predict", content=good[0], headers=key("robot"), params={"version": 99}).status_code == 404
        assert http.post("/versions/1/activate", headers=key("robot")).status_code == 403
        assert [http.get("/versions", headers=key("app")).status_code for _ in range(3)] == [200] * 3
        for number in range(7):
            assert http.get(f"/no/such/thing/{number}").status_code == 404
        assert http.get("/livez").status_code == 200
        wait_until(lambda: server.metric("openworld_novelties", state="new") == 3)
        return Traffic(http.get("/metrics", headers=key("app")).text)


# Names and help texts


@pytest.mark.parametrize("name", EXPECTED)
def test_every_expected_metric_is_exported(traffic: Traffic, name: str) -> None:
    kind, labels = EXPECTED[name]
    family = families(traffic.text)[f"openworld_{name}"]
    assert family.type == kind
    assert family.documentation
    assert family.samples
    for sample in family.samples:
        assert set(sample.labels) - {"le"} == labels


def test_every_metric_has_a_help_text_and_a_conventional_name(traffic: Traffic) -> None:
    ours = {name: family for name, family in families(traffic.text).items() if name.startswith("openworld_")}
    assert len(ours) >= len(EXPECTED)
    for name, family in ours.items():
        assert len(family.documentation) > 10, name
        assert re.fullmatch(r"openworld_[a-z_]+", name)
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent|created)$", name), name


def test_the_text_format_is_prometheus_and_includes_process_metrics(server: RunningServer) -> None:
    response = server.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= set(families(response.text))


def test_series_known_in_advance_start_at_zero(tmp_path: Path) -> None:
    with running_server(tmp_path / "empty", threads=1) as server:
        text = server.get("/metrics").text
    assert series(text, "openworld_rejected_total") == {(reason,): 0 for reason in REJECTED}
    assert set(series(text, "openworld_model_load_failures_total").values()) == {0}
    assert {one.labels["stage"] for one in families(text)["openworld_stage_duration_seconds"].samples} == set(STAGES)
    assert series(text, "openworld_model_info") == {("", "0"): 1}  # nothing is learned: everything is novel
    assert metric_value(text, "openworld_model_swaps_total") == 0


# Values


def test_predictions_are_counted_by_outcome_version_and_client(traffic: Traffic) -> None:
    assert series(traffic.text, "openworld_predictions_total") == {  # client, outcome, version
        ("robot", "known", "3"): 3,
        ("robot", "novel", "3"): 2,
        ("robot", "error", "3"): 2,
        ("app", "known", "3"): 5,
        ("app", "novel", "3"): 1,
        ("app", "error", "3"): 2,
        ("app", "known", "2"): 2,
    }


def test_requests_are_counted_by_route_and_code(traffic: Traffic) -> None:
    found = series(traffic.text, "openworld_requests_total")  # code, route
    del found["200", "/metrics"]  # polled until the novelties were stored
    assert found == {
        ("200", "/predict"): 8,
        ("401", "/predict"): 1,
        ("404", "/predict"): 1,
        ("415", "/predict"): 1,
        ("422", "/predict"): 1,
        ("200", "/versions"): 3,
        ("403", "/versions/{version}/activate"): 1,
        ("404", "unmatched"): 7,
        ("200", "/livez"): 1,
    }


def test_every_request_has_its_duration(traffic: Traffic) -> None:
    requests: Counter[str] = Counter()
    for (_, route), count in series(traffic.text, "openworld_requests_total").items():
        requests[route] += int(count)
    for route, count in requests.items():
        assert traffic.value("request_duration_seconds_count", route=route) == count
        assert 0 < traffic.value("request_duration_seconds_sum", route=route) < 60
        assert traffic.value("request_duration_seconds_bucket", route=route, le="+Inf") == count


def test_every_image_that_was_read_is_in_one_batch_and_has_one_score(traffic: Traffic) -> None:
    assert traffic.value("batch_size_sum") == 13
    assert 1 <= traffic.value("batch_size_count") <= 13
    assert traffic.value("calibrated_score_count", version="3") == 11
    assert traffic.value("calibrated_score_count", version="2") == 2
    assert 0 < traffic.value("calibrated_score_sum", version="3") <= 11
    assert traffic.value("calibrated_score_bucket", version="3", le="1.0") == 11


def test_every_stage_is_timed(traffic: Traffic) -> None:
    count = {stage: traffic.value("stage_duration_seconds_count", stage=stage) for stage in STAGES}
    # read: per request whose body was read; decode and queue: per image; score: per batch
    assert count == {"read": 11, "decode": 13, "queue": 13, "score": traffic.value("batch_size_count")}
    assert all(0 < traffic.value("stage_duration_seconds_sum", stage=stage) < 60 for stage in STAGES)


def test_nothing_stays_in_progress(traffic: Traffic) -> None:
    assert traffic.value("queue_depth") == traffic.value("in_flight_images") == 0
    assert traffic.value("ready") == 1
    assert set(series(traffic.text, "openworld_rejected_total").values()) == {0}


def test_novelties_are_counted_by_state_and_similar_ones_are_folded(server: RunningServer, traffic: Traffic) -> None:
    states = series(traffic.text, "openworld_novelties")
    assert states == {("new",): 3} | {state: 0 for state in states if state != ("new",)}
    assert len(states) >= 3
    sizes = sum(len(novel_image(number)) for number in range(3))
    assert traffic.value("novelties_bytes") == sizes
    for _ in range(2):
        assert server.post("/predict", content=novel_image(0), headers=key("robot")).json()["predictions"][0]["novel"]
    wait_until(lambda: server.metric("openworld_novelties_folded_total") == 2, 5)
    assert server.metric("openworld_novelties", state="new") == 3
    assert set(series(server.get("/metrics").text, "openworld_novelties_dropped_total").values()) == {0}


def test_an_activation_counts_a_swap_and_names_the_active_version(server: RunningServer, traffic: Traffic) -> None:
    ((sha256, version),) = series(traffic.text, "openworld_model_info")
    assert (version, traffic.value("model_info", version="3", sha256=sha256)) == ("3", 1)
    assert re.fullmatch("[0-9a-f]{64}", sha256)
    assert traffic.value("model_swaps_total") == 1  # at startup
    try:
        for swaps, number in ((2, 2), (2, 2), (3, 1)):  # the second time it is active already
            assert server.post(f"/versions/{number}/activate", headers=key("app")).status_code == 200
            text = server.get("/metrics").text
            ((other, version),) = series(text, "openworld_model_info")
            assert (version, other != sha256) == (str(number), True)
            assert metric_value(text, "openworld_model_swaps_total") == swaps
    finally:
        assert server.post("/versions/3/activate", headers=key("app")).status_code == 200
    assert series(server.get("/metrics").text, "openworld_model_info") == {(sha256, "3"): 1}


def test_the_active_version_exports_its_estimates_and_its_threshold(tmp_path: Path) -> None:
    store = VersionStore(learned_folder(tmp_path / "robot"))
    loaded = store.load()
    for accuracy, settings in ((0.9, {"accept": 0.95, "flag": None}), (None, {"accept": 0.95, "flag": 0.8})):
        number = store.current()
        changes = {
            "parent": number,
            "task_id": f"task-{number}",
            "metrics": {"accuracy": accuracy, "novelty_auc": 0.8},
            "settings": settings,
            "novel_above": 0.7,
        }
        store.publish(loaded.manifest.model_copy(update=changes), loaded.tensors, loaded.samples)

    def figures(server: RunningServer) -> dict[str, dict[tuple[str, ...], float]]:
        text = server.get("/metrics").text
        names = ("accuracy", "novelty_auc", "novel_above", "target_ratio")
        return {name: series(text, f"openworld_version_{name}") for name in names}

    common = {"novelty_auc": {("5",): 0.8}, "novel_above": {("5",): 0.7}}
    with running_server(tmp_path / "robot", threads=1) as server:
        assert figures(server) == {**common, "accuracy": {}, "target_ratio": {("flag", "5"): 0.8}}
        assert server.post("/versions/4/activate").status_code == 200
        common = {"novelty_auc": {("4",): 0.8}, "novel_above": {("4",): 0.7}}
        assert figures(server) == {**common, "accuracy": {("4",): 0.9}, "target_ratio": {("accept", "4"): 0.95}}


def test_a_version_that_cannot_be_loaded_is_counted_by_its_damage(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    VersionStore(data).content_path(1, "heads").unlink()
    with running_server(data, threads=1) as server:
        response = server.post("/predict", content=known_image("class 0"), params={"version": 1})
        assert (response.status_code, response.json()["code"]) == (409, "version_unusable")
        failures = series(server.get("/metrics").text, "openworld_model_load_failures_total")
        assert {reason: count for reason, count in failures.items() if count} == {("missing",): 1}


# Rejections


def test_rejected_requests_are_counted_by_reason(tmp_path: Path) -> None:
    settings = {"images_in_flight": 1, "max_request_images": 1, "threads": 1, "inbox": "false"}
    with running_server(learned_folder(tmp_path / "robot"), **settings) as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")

        def half(*headers: str) -> socket.socket:
            """A request that is admitted and never finishes its body."""
            connection = socket.create_connection((host, int(port)), timeout=20)
            lines = "\r\n".join(
                ["POST /predict HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 99", *headers, "", "half"]
            )
            connection.sendall(lines.encode())
            wait_until(lambda: server.metric("openworld_in_flight_images") == 1)
            return connection

        with half():
            for _ in range(3):
                full = server.post("/predict", content=known_image("class 0"))
                assert (full.status_code, full.json()["code"]) == (429, "queue_full")
                assert full.headers["retry-after"] == "1"
        wait_until(lambda: server.metric("openworld_rejected_total", reason="abandoned") == 1)
        with half("X-Request-Timeout: 0.7") as late:
            assert late.recv(12) == b"HTTP/1.1 504"
        text = server.get("/metrics").text
        assert series(text, "openworld_rejected_total") == {
            ("queue_full",): 3,
            ("abandoned",): 1,
            ("deadline_passed",): 1,
            **{(reason,): 0 for reason in REJECTED if reason not in ("queue_full", "abandoned", "deadline_passed")},
        }
        codes = {
            code: count
            for (code, route), count in series(text, "openworld_requests_total").items()
            if route == "/predict"
        }
        assert codes == {"429": 3, "499": 1, "504": 1}
        assert metric_value(text, "openworld_in_flight_images") == metric_value(text, "openworld_queue_depth") == 0
        assert server.post("/predict", content=known_image("class 0")).status_code == 200


# Names of keys


def test_only_monitors_and_operators_see_the_names_of_keys(tmp_path: Path) -> None:
    roles = ("predict", "label", "operate", "monitor")
    secrets = {role: f"{role}-secret-of-the-metrics" for role in roles}
    keys = ",".join(f"name-of-{role}:{role}{'+predict' * (role == 'label')}:{secrets[role]}" for role in roles)
    with running_server(learned_folder(tmp_path / "robot"), threads=1, inbox=False, keys=keys) as server:
        for role in ("predict", "label", "label"):
            answer = server.post("/predict", content=known_image("class 0"), headers={"X-API-Key": secrets[role]})
            assert answer.status_code == 200
        texts = {role: server.get("/metrics", headers={"X-API-Key": secrets[role]}).text for role in roles}
        texts["unknown"] = server.get("/metrics", headers={"X-API-Key": "not-a-key-of-this-server"}).text
        texts["none"] = server.get("/metrics").text
    for caller in ("predict", "label", "unknown", "none"):
        assert "name-of" not in texts[caller]
        assert metric_value(texts[caller], "openworld_predictions_total", outcome="known", version="3") == 3
    for caller in ("operate", "monitor"):
        of_label = {"outcome": "known", "version": "3", "client": "name-of-label"}
        assert metric_value(texts[caller], "openworld_predictions_total", **of_label) == 2
    known = {line.partition("{")[0] for line in texts["operate"].splitlines() if line.startswith("openworld_")}
    assert known == {line.partition("{")[0] for line in texts["none"].splitlines() if line.startswith("openworld_")}


# Bounds


def test_unknown_paths_methods_and_keys_make_no_series(server: RunningServer) -> None:
    routes = set(server.get("/openapi.json").json()["paths"]) | {"/openapi.json", "unmatched"}
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for number in range(20):
            http.get(f"/unknown/{number}?a={number}")
            http.request("PATCH", f"/versions/{number + 500}/activate")
            http.post(f"/versions/{number + 500}/activate", headers=key("app"))
            http.post("/predict", content=b"x", headers={"X-API-Key": f"unknown {number}"})
    text = server.get("/metrics", headers=key("app")).text
    assert {route for _, route in series(text, "openworld_requests_total")} <= routes
    assert {client for client, _, _ in series(text, "openworld_predictions_total")} <= set(SECRETS)
