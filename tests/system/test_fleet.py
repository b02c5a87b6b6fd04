"""The fleet of `make fleet` on a tiny backbone: servers behind nginx, trainers, an object store and sentinels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import httpx2 as httpx
import pytest

from deploy.fleet.fleet import STORE, Fleet, Member, serving
from deploy.fleet.monitoring import healthy_targets
from deploy.fleet.object_store import environment_of
from deploy.fleet.programs import missing_programs
from models.files import sha256_bytes
from models.storage import open_storage
from openworld.cli import main
from tests.support.learning_loop import LEASE, Loop, batch
from tests.support.loop_programs import start_program
from tests.support.prometheus import Prometheus, queries
from tests.support.redis_servers import RedisServer
from tests.support.servers import known_image, learned_folder, novel_image
from tests.support.settings import clean_environment, variables
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason="; ".join(missing_programs()))
PNG = {"Content-Type": "image/png"}


@dataclass
class Running:
    fleet: Fleet
    loop: Loop  # its requests go to the balancer
    since: float = field(default_factory=time.time)

    @property
    def inbox_owner(self) -> Member:
        wait_until(lambda: any(map(owns_inbox, self.fleet.servers)))
        return next(filter(owns_inbox, self.fleet.servers))

    def wait_until_all_serve(self, version: int) -> None:
        wait_until(lambda: {serving(server) for server in self.fleet.servers} == {version})


def owns_inbox(server: Member) -> bool:
    if not server.runs:
        return False
    forwarded = {"X-Openworld-Forwarded": "1"}  # is answered by the owner only
    return httpx.get(f"{server.url}/novelties", headers=forwarded, timeout=30).status_code == 200


def predict(url: str, image: bytes) -> dict[str, Any]:
    response = httpx.post(f"{url}/predict", content=image, headers=PNG, timeout=30)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()["predictions"][0]
    return answer


def novelties(url: str) -> dict[str, int]:
    """Novelty -> sightings."""
    response = httpx.get(f"{url}/novelties", params={"limit": 200}, timeout=30)
    return {item["id"]: item["count"] for item in response.json()["items"]} if response.status_code == 200 else {}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fleet")
    settings = {"lease_seconds": LEASE, "nice": 0, "provisional": "off", "poll_seconds": 0.2, "drain_seconds": 0}
    faults = {"FAULT": "", "HOLD": str(folder / "loop.hold"), "OPENWORLD_LOG_FORMAT": "json"}
    environment = clean_environment() | variables(**settings) | faults
    with Fleet(folder / "fleet", None, environment, start_program) as fleet, pytest.MonkeyPatch.context() as patch:
        fleet.start_services()
        for name, value in environment_of(fleet.store.port).items():
            patch.setenv(name, value)
        assert main(["migrate", str(learned_folder(folder / "source")), STORE]) == 0
        fleet.start_programs()
        redis, storage = cast(RedisServer, fleet.redis), open_storage(folder / "tests", STORE)
        loop = Loop(folder / "loop", redis, url=fleet.url, storage=storage)
        yield Running(fleet, loop)
        loop.check()
    assert not any(member.runs for member in fleet.members)


def test_a_task_through_the_balancer_is_learned_once_and_served_by_all(running: Running) -> None:
    running.wait_until_all_serve(3)
    accepted = running.loop.submit(batch("new-1", "new-2"))
    assert accepted.status_code == 202, accepted.text
    running.loop.check_learned_once(accepted.json()["id"])
    running.wait_until_all_serve(4)
    assert {predict(running.fleet.url, known_image("new-1", 90))["version"] for _ in range(6)} == {4}
    wait_until(lambda: healthy_targets(running.fleet.prometheus_port) == len(running.fleet.members))
    prometheus = Prometheus(f"http://127.0.0.1:{running.fleet.prometheus_port}", running.since)
    for query in (query for query in queries() if query.of_object_store):
        wait_until(lambda: bool(prometheus.values(query.rendered("1m"))), 60)  # noqa: B023


def test_a_prediction_of_one_server_is_labelled_through_another(running: Running) -> None:
    first, second, _ = running.fleet.servers
    ids = [predict(first.url, known_image("class 0", number))["id"] for number in (70, 71)]
    body = {"classes": {"gizmo": ids}}

    def submit() -> httpx.Response:
        return httpx.post(f"{second.url}/tasks", json=body, timeout=30)

    wait_until(lambda: submit().status_code == 202)  # a thread copies predictions to Redis
    again = submit().json()  # the same batch is the same task
    assert again["counts"] == {"gizmo": 2}
    assert running.loop.wait_until_ended(again["id"])["state"] in ("published", "rejected")


def test_the_novelties_of_a_killed_inbox_owner_are_still_there(running: Running) -> None:
    owner = running.inbox_owner
    for number in (4, 5):
        for server in running.fleet.servers:
            predict(server.url, novel_image(number))
    seen = {sha256_bytes(novel_image(number)): 3 for number in (4, 5)}
    wait_until(lambda: seen.items() <= novelties(running.fleet.url).items())
    running.fleet.kill(owner)
    for _ in range(6):
        predict(running.fleet.url, novel_image(6))  # nginx asks another server
    after = seen | {sha256_bytes(novel_image(6)): 6}
    wait_until(lambda: after.items() <= novelties(running.fleet.url).items())
    assert running.inbox_owner is not owner
    running.fleet.start_member(owner)
    running.fleet.wait_until_ready(owner)


def test_the_standby_finishes_the_task_of_a_killed_trainer(running: Running) -> None:
    loop, fleet = running.loop, running.fleet
    with loop.holding_trainers(epoch=2):
        id = loop.submit(batch("new-3", "new-4")).json()["id"]
        wait_until(lambda: loop.finished_epochs(id) >= 2, 60)
        active = fleet.active_trainer()
        assert active is not None
        fleet.kill(active)
    loop.check_learned_once(id)
    task = loop.task(id)
    assert task["progress"]["losses"] == []  # the standby computed no epoch again
    running.wait_until_all_serve(task["version"])
    fleet.start_member(active)
    wait_until(lambda: healthy_targets(fleet.prometheus_port) == len(fleet.members))
