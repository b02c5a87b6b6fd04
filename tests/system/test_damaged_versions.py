"""A damaged version is never served: the previous one keeps answering, and the reason is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from models.versions.store import VersionStore
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return learned_folder(tmp_path / "robot", current=2)


@pytest.fixture
def server(data: Path) -> Iterator[RunningServer]:
    with running_server(data, poll_seconds=0.05) as running:
        yield running


def flip_byte(data: Path, version: int = 3, role: str = "heads") -> None:
    file = VersionStore(data).content_path(version, role)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_manifest(data: Path, **fields: object) -> None:
    file = VersionStore(data).manifest_path(3)
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def truncate(data: Path) -> None:
    file = VersionStore(data).content_path(3, "task.2")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "one flipped byte": (flip_byte, "changed", "does not match its sha256"),
    "one flipped byte of the new task": (lambda data: flip_byte(data, role="task.2"), "changed", "does not match its"),
    "a missing file": (
        lambda data: VersionStore(data).content_path(3, "samples").unlink(),
        "missing",
        "cannot be read",
    ),
    "a missing manifest": (lambda data: VersionStore(data).manifest_path(3).unlink(), "missing", "cannot be read"),
    "another backbone": (
        lambda data: change_manifest(data, backbone_sha256="a" * 64),
        "backbone",
        "made with the backbone",
    ),
    "a newer schema": (lambda data: change_manifest(data, schema_version=99), "schema", "upgrade openworld"),
    "half written": (truncate, "changed", "the manifest says"),
    "a manifest that is no JSON": (
        lambda data: VersionStore(data).manifest_path(3).write_text("{"),
        "invalid",
        "not JSON",
    ),
    "a manifest without graphs": (lambda data: change_manifest(data, graphs={}), "invalid", "names no graph"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_the_previous_version_keeps_answering_and_the_reason_is_reported(
    server: RunningServer, data: Path, what: str
) -> None:
    damage, code, reason = DAMAGES[what]
    damage(data)
    (data / "CURRENT").write_text("3\n")  # promoted although its files are damaged
    wait_until(lambda: server.get("/versions").json()["problem"] is not None)

    answer = server.post("/predict", content=known_image("class 0"))
    assert answer.status_code == 200
    assert answer.json()["predictions"][0]["version"] == 2
    assert server.get("/readyz").status_code == 200

    found = server.get("/versions").json()
    assert (found["serving"], found["current"]) == (2, 3)
    assert found["problem"]["version"] == 3
    assert found["problem"]["code"] == code
    assert reason in found["problem"]["reason"]
    assert server.metric("openworld_model_load_failures_total", reason=code) >= 1
    shown = {version["version"]: version for version in found["versions"]}
    assert shown[2]["state"] == "serving"
    if 3 in shown:
        assert shown[3]["state"] == "damaged"
        assert reason in shown[3]["reason"]

    pinned = server.post("/predict", content=known_image("class 0"), params={"version": 3})
    assert pinned.status_code in (404, 409)


def test_a_repaired_version_is_retried_and_served(server: RunningServer, data: Path) -> None:
    file = VersionStore(data).content_path(3, "heads")
    whole = file.read_bytes()
    flip_byte(data)
    (data / "CURRENT").write_text("3\n")
    wait_until(lambda: (server.get("/versions").json()["problem"] or {}).get("attempts", 0) >= 2)
    # CURRENT is written in place here, so the server may have seen it empty before.
    first, second, *_ = (line for line in server.log_lines() if "version 3 cannot be loaded" in line["message"])
    assert "next try in 1 s" in first["message"]
    assert "next try in 2 s" in second["message"]
    file.write_bytes(whole)
    server.wait_for_version(3, 60)
    assert server.get("/versions").json()["problem"] is None


def test_a_damaged_version_cannot_be_activated(server: RunningServer, data: Path) -> None:
    flip_byte(data, 1)
    refused = server.post("/versions/1/activate")
    assert (refused.status_code, refused.json()["code"]) == (409, "version_unusable")
    assert (data / "CURRENT").read_text() == "2\n"
    assert server.get("/versions").json()["serving"] == 2


def test_an_unreadable_current_file_is_reported_and_the_server_keeps_answering(
    server: RunningServer, data: Path
) -> None:
    (data / "CURRENT").write_text("rubbish\n")
    wait_until(lambda: server.get("/versions").json()["problem"] is not None)
    problem = server.get("/versions").json()["problem"]
    assert problem["version"] is None
    assert "CURRENT" in problem["reason"]
    assert server.post("/predict", content=known_image("class 0")).json()["predictions"][0]["version"] == 2
    assert server.post("/versions/3/activate").status_code == 200
    assert server.get("/versions").json()["problem"] is None


def test_a_server_started_with_a_damaged_current_version_serves_the_one_before_it(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    flip_byte(data)
    with running_server(data) as server:
        found = server.get("/versions").json()
        assert (found["serving"], found["current"]) == (2, 3)
        assert found["problem"]["code"] == "changed"
        assert server.post("/predict", content=known_image("class 0")).json()["predictions"][0]["version"] == 2


def test_a_server_that_cannot_load_any_version_is_not_ready(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    for version in (1, 2, 3):
        flip_byte(data, version)
    with running_server(data) as server:
        for refused in (server.get("/readyz"), server.post("/predict", content=known_image("class 0"))):
            assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
            assert int(refused.headers["Retry-After"]) >= 1
        assert server.get("/livez").status_code == 200
        assert server.get("/versions").json()["problem"]["version"] == 3
