"""`?version=` on a real server: one load per version, also for cancelled requests, and none that delays a swap."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from models.versions.edits import Edit, publish_edit
from models.versions.store import MANIFEST, TENSORS, VersionStore
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until

SLOW, ALSO_SLOW, DAMAGED = 1, 2, 3  # version 4 is active
MIB = 2**20
SLOW_BYTES = 256 * MIB
FAILURES = "openworld_model_load_failures_total"


def slow_to_load(data: Path, *versions: int) -> None:
    """Let the manifests name one more graph: a large sparse file, whose hash takes tenths of a second to verify."""
    digest, chunk = hashlib.sha256(), bytes(MIB)
    for _ in range(SLOW_BYTES // MIB):
        digest.update(chunk)
    store = VersionStore(data)
    with store.graph_path(digest.hexdigest()).open("wb") as file:
        file.truncate(SLOW_BYTES)
    for version in versions:
        manifest = store.folder(version) / MANIFEST
        content = json.loads(manifest.read_text())
        content["graphs"]["extra"] = digest.hexdigest()
        manifest.write_text(json.dumps(content))


def damage(data: Path, version: int) -> None:
    file = VersionStore(data).folder(version) / TENSORS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def bytes_read(server: RunningServer) -> int:
    """All bytes that the process has read; the metrics miss loads whose request gave up."""
    lines = Path(f"/proc/{server.process.pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("pinned") / "robot")
    publish_edit(VersionStore(data), Edit("rename", "class 0", "class zero"), "operator", "a test")
    slow_to_load(data, SLOW, ALSO_SLOW)
    damage(data, DAMAGED)
    with running_server(data) as running:
        yield running


def test_requests_that_give_up_share_one_load_of_a_version(server: RunningServer) -> None:
    image = known_image("class 0")
    before = bytes_read(server)

    def give_up(number: int) -> int:
        url = f"{server.url}/{'explain' if number % 2 else 'predict'}?version={SLOW}"
        return httpx.post(url, content=image, headers={"X-Request-Timeout": "0.1"}, timeout=60).status_code

    with ThreadPoolExecutor(64) as clients:
        assert set(clients.map(give_up, range(64))) == {504}
    assert server.post(f"/predict?version={SLOW}", content=image).status_code == 200
    assert SLOW_BYTES <= bytes_read(server) - before < 2 * SLOW_BYTES


def test_a_damaged_version_is_not_verified_again_at_each_request(server: RunningServer) -> None:
    before = server.metric(FAILURES, reason="changed")
    for _ in range(5):
        refused = server.post(f"/predict?version={DAMAGED}", content=known_image("class 0"))
        assert (refused.status_code, refused.json()["code"]) == (409, "version_unusable")
        assert "does not match its sha256" in refused.json()["detail"]
    assert server.metric(FAILURES, reason="changed") - before == 1


def test_a_swap_does_not_wait_for_the_load_of_a_pinned_version(server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as clients:
        pinned = clients.submit(server.post, f"/predict?version={ALSO_SLOW}", content=known_image("class 0"))
        wait_until(lambda: server.metric("openworld_in_flight_images") == 1)
        edited = httpx.patch(f"{server.url}/classes/class 1", json={"rename": "class one"}, timeout=30)
        assert edited.status_code == 200
        assert server.get("/readyz").json()["version"] == edited.json()["version"]
        assert not pinned.done()
        assert pinned.result().status_code == 200
