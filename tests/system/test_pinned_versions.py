"""`?version=` on a real server: one load per version, also for cancelled requests, and none that delays a swap."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from models.files import sha256_bytes
from models.versions.edits import Edit, publish_edit
from models.versions.store import VersionStore
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until

SLOW, ALSO_SLOW, DAMAGED = 1, 3, 2  # version 4, an edit of version 3, is active
FAILURES = "openworld_model_load_failures_total"


class SlowGraph:
    """One more graph of a version, a named pipe: the version is loaded when the test writes to it, once per load."""

    def __init__(self, data: Path, version: int) -> None:
        self._content = f"graph of version {version}".encode()
        store, sha256 = VersionStore(data), sha256_bytes(self._content)
        self._path = store.graph_path(sha256)
        os.mkfifo(self._path)
        manifest = store.manifest_path(version)
        content = json.loads(manifest.read_text())
        content["graphs"]["extra"] = sha256
        manifest.write_text(json.dumps(content))

    @property
    def is_read(self) -> bool:
        """Whether a load waits for the content."""
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # no reader
            return False
        return True

    def finish_load(self) -> None:
        self._path.write_bytes(self._content)


def damage(data: Path, version: int) -> None:
    file = VersionStore(data).content_path(version, "heads")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = learned_folder(tmp_path_factory.mktemp("pinned") / "robot")
    publish_edit(VersionStore(data), Edit("rename", "class 0", "class zero"), "operator", "a test")
    damage(data, DAMAGED)
    return data


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[RunningServer]:
    with running_server(data, fresh=True, request_timeout=60) as running:
        yield running


def test_requests_that_give_up_share_one_load_of_a_version(server: RunningServer, data: Path) -> None:
    image, graph = known_image("class 0"), SlowGraph(data, SLOW)

    def give_up(number: int) -> int:
        url = f"{server.url}/{'explain' if number % 2 else 'predict'}?version={SLOW}"
        return httpx.post(url, content=image, headers={"X-Request-Timeout": "0.1"}, timeout=60).status_code

    with ThreadPoolExecutor(65) as clients:
        assert set(clients.map(give_up, range(64))) == {504}
        patient = clients.submit(server.post, f"/predict?version={SLOW}", content=image)
        graph.finish_load()
        assert patient.result().status_code == 200  # a second load would wait for the graph again
    assert server.post(f"/explain?version={SLOW}", content=image).status_code == 200
    assert not graph.is_read


def test_a_damaged_version_is_not_verified_again_at_each_request(server: RunningServer) -> None:
    before = server.metric(FAILURES, reason="changed")
    for _ in range(5):
        refused = server.post(f"/predict?version={DAMAGED}", content=known_image("class 0"))
        assert (refused.status_code, refused.json()["code"]) == (409, "version_unusable")
        assert "does not match its sha256" in refused.json()["detail"]
    assert server.metric(FAILURES, reason="changed") - before == 1


def test_a_swap_does_not_wait_for_the_load_of_a_pinned_version(server: RunningServer, data: Path) -> None:
    graph = SlowGraph(data, ALSO_SLOW)
    with ThreadPoolExecutor(1) as clients:
        pinned = clients.submit(server.post, f"/predict?version={ALSO_SLOW}", content=known_image("class 0"))
        wait_until(lambda: server.metric("openworld_in_flight_images") == 1)
        edited = httpx.patch(f"{server.url}/classes/class 1", json={"rename": "class one"}, timeout=30)
        assert edited.status_code == 200
        assert server.get("/readyz").json()["version"] == edited.json()["version"]
        assert not pinned.done()
        graph.finish_load()
        assert pinned.result().status_code == 200
