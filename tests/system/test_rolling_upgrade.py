"""Programs of two releases on one data folder, as during a rolling upgrade and after a roll back of the programs.

The next release is this one, but its manifests have a newer minor format with fields that this release does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx

from openworld.check import check_folder
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until


def label_of(server: RunningServer, image: bytes) -> str | None:
    response = server.post("/predict", content=image)
    assert response.status_code == 200, response.text
    label: str | None = response.json()["predictions"][0]["label"]
    return label


def rename(server: RunningServer, name: str, to: str) -> int:
    response = server.get("/classes")
    assert name in {entry["name"] for entry in response.json()["classes"]}, response.text
    edited = httpx.patch(f"{server.url}/classes/{name}", json={"rename": to}, timeout=30)
    assert edited.status_code == 200, edited.text
    version: int = edited.json()["version"]
    return version


@dataclass
class Traffic:
    """The requests of `steady_requests`."""

    answered: int = 0
    failures: list[str] = field(default_factory=list)

    def wait_for_more(self) -> None:
        """Wait for the answer to a request that is sent from now on."""
        enough = self.answered + 2  # the next answer may be to a request that was sent before
        wait_until(lambda: self.answered >= enough or self.failures, 60)


@contextmanager
def steady_requests(*servers: str) -> Iterator[Traffic]:
    """Predict all the time, as through a balancer: by the next server if one does not accept the connection.

    A server that stops closes a connection whose request it has not read: at most one here, because one thread sends.
    """
    stop, traffic, image = threading.Event(), Traffic(), known_image("class 4")
    closed = 0

    def send() -> None:
        nonlocal closed
        with httpx.Client(timeout=30) as client:
            while not stop.is_set():
                for url in servers:
                    try:
                        response = client.post(f"{url}/predict", content=image)
                    except httpx.ConnectError:
                        continue
                    except httpx.TransportError as error:
                        closed += 1
                        if closed > 1 or isinstance(error, httpx.TimeoutException):
                            traffic.failures.append(f"{url}: {error!r}")
                        continue
                    if response.status_code != 200 or response.json()["predictions"][0]["label"] != "class 4":
                        traffic.failures.append(response.text)
                    traffic.answered += 1
                    break
                else:
                    traffic.failures.append("no server answered")
                stop.wait(0.01)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield traffic
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def test_servers_of_two_releases_share_a_data_folder_and_no_request_fails(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    with (
        running_server(data, tmp_path / "old.log", poll_seconds=0.1) as old,
        running_server(data, tmp_path / "new.log", next_release=True, poll_seconds=0.1) as new,
        steady_requests(old.url, new.url) as traffic,
    ):
        version = rename(new, "class 0", "renamed by the next release")
        assert b"of_the_next_release" in (data / "versions" / f"{version:06d}.json").read_bytes()
        old.wait_for_version(version)
        assert label_of(old, known_image("class 0")) == "renamed by the next release"

        version = rename(old, "class 1", "renamed by this release")
        new.wait_for_version(version)
        assert label_of(new, known_image("class 1")) == "renamed by this release"
        assert label_of(new, known_image("class 0")) == "renamed by the next release"

        traffic.wait_for_more()
        assert old.stop() == 0
        version = rename(new, "renamed by the next release", "after the upgrade")
        traffic.wait_for_more()
    assert traffic.failures == []
    with running_server(data, tmp_path / "rolled-back.log") as rolled_back:
        assert rolled_back.get("/versions").json()["serving"] == version
        assert label_of(rolled_back, known_image("class 0")) == "after the upgrade"
    assert check_folder(data, None).problems == []
