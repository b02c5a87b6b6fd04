"""Two servers that share recent predictions, the inbox and rates: in one folder, and on two machines with a bucket."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest

from models.files import sha256_bytes
from models.storage import Storage, open_storage
from openworld.check import check_folder
from openworld.cli import main
from service.shared.inbox import LEASE_SECONDS
from tasks.queue import connect
from tests.support.novelties import block_image
from tests.support.object_stores import new_bucket
from tests.support.redis_servers import RedisServer
from tests.support.servers import RunningServer, known_image, learned_folder, novel_image, running_server
from tests.support.waiting import wait_until

LABEL, PREDICT = "a-label-secret-of-the-tests-0123", "a-predict-secret-of-the-tests-01"
KEYS = f"ann:predict+label+operate:{LABEL},robot:predict:{PREDICT}"
TAKE_OVER_SECONDS = 60  # at most the lease, and what a busy machine needs to read the rows


@dataclass
class Fleet:
    """Two servers, of which one owns the inbox."""

    storage: Storage
    redis: RedisServer
    servers: list[RunningServer]

    @property
    def owner(self) -> RunningServer:
        """The server that answers a request that was forwarded to it."""
        wait_until(lambda: any(map(_owns_inbox, self.servers)))
        return next(filter(_owns_inbox, self.servers))

    @property
    def other(self) -> RunningServer:
        owner = self.owner
        return next(one for one in self.servers if one is not owner)


@pytest.fixture(scope="module", params=["one folder", "one bucket"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    data, url = learned_folder(folder / "robot"), None
    folders = [data, data]
    if request.param == "one bucket":
        request.getfixturevalue("seaweedfs")
        url = new_bucket()
        assert main(["migrate", str(data), url]) == 0
        folders = [folder / "a", folder / "b"]
    with RedisServer(folder / "redis") as redis:
        settings = {"redis_url": redis.url, "shared": "recent,inbox,rates", "keys": KEYS, "poll_seconds": 0.2}
        settings |= {} if url is None else {"store": url}
        with (
            running_server(folders[0], folder / "1.log", **settings) as first,
            running_server(folders[1], folder / "2.log", **settings) as second,
        ):
            yield Fleet(open_storage(folders[0], url), redis, [first, second])


def ask(server: RunningServer, method: str, path: str, key: str | None = LABEL, **arguments: Any) -> httpx.Response:
    headers = arguments.pop("headers", {}) | ({"Authorization": f"Bearer {key}"} if key else {})
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=30, **arguments)


def _owns_inbox(server: RunningServer) -> bool:
    return ask(server, "GET", "/novelties", headers={"X-Openworld-Forwarded": "1"}).status_code == 200


def predict(server: RunningServer, image: bytes) -> dict[str, Any]:
    headers = {"Content-Type": "image/png"}
    response = ask(server, "POST", "/predict", PREDICT, content=image, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()["predictions"][0]
    return answer


def listed(server: RunningServer, state: str = "new") -> dict[str, int]:
    """Novelty -> sightings."""
    response = ask(server, "GET", "/novelties", params={"state": state, "limit": 200})
    assert response.status_code == 200, response.text
    return {item["id"]: item["count"] for item in response.json()["items"]}


def test_a_prediction_of_one_server_is_labelled_through_the_other(fleet: Fleet) -> None:
    one, two = fleet.servers
    novel = [predict(one, novel_image(number)) for number in (1, 2)]
    wait_until(lambda: all(sha256_bytes(novel_image(number)) in listed(two) for number in (1, 2)))
    known = [predict(two, known_image("class 0", number))["id"] for number in (70, 71)]

    def submit() -> httpx.Response:
        return ask(two if fleet.owner is one else one, "POST", "/tasks", json={"classes": {
            "gizmo": [answer["id"] for answer in novel], "widget": known}})  # fmt: skip

    wait_until(lambda: submit().status_code == 202)  # a thread copies predictions to Redis
    assert submit().json()["counts"] == {"gizmo": 2, "widget": 2}
    ids = {sha256_bytes(novel_image(number)) for number in (1, 2)}
    wait_until(lambda: ids <= listed(one, "labelled").keys())
    assert not ids & listed(two).keys()


def test_every_server_shows_and_changes_the_one_inbox(fleet: Fleet) -> None:
    owner, other = fleet.owner, fleet.other
    image = block_image(11)
    id = sha256_bytes(image)
    answer = predict(owner, image)
    if not answer["novel"]:  # report it through the server that did not answer
        wait_until(lambda: ask(other, "POST", "/novelties", json={"prediction_ids": [answer["id"]]}).status_code == 200)
    wait_until(lambda: id in listed(other))
    assert listed(other) == listed(owner)
    shown = ask(other, "GET", f"/novelties/{id}/image")
    assert (shown.content, shown.headers["content-type"]) == (image, "image/png")
    unchanged = ask(other, "GET", f"/novelties/{id}/image", headers={"If-None-Match": shown.headers["etag"]})
    assert unchanged.status_code == 304
    assert ask(other, "GET", f"/novelties/{id}/thumbnail").headers["content-type"] == "image/jpeg"
    assert ask(other, "GET", "/novelties/groups").status_code == 200
    assert ask(other, "POST", "/novelties/dismiss", json={"ids": [id]}).json()["changed"] == [id]
    assert id in listed(owner, "dismissed")
    assert ask(other, "GET", "/novelties/unknown").json()["code"] == "not_found"
    assert ask(other, "GET", "/novelties?limit=0").status_code == 422
    audited = ask(owner, "GET", "/audit").json()["items"]
    assert [entry["by"] for entry in audited if entry["action"] == "novelty.dismiss"] == ["ann"], "once, as the caller"


def test_a_forwarded_request_has_the_rights_of_its_caller_and_is_forwarded_once(fleet: Fleet) -> None:
    other = fleet.other
    assert ask(other, "GET", "/novelties", None).json()["code"] == "unauthorized"
    assert ask(other, "GET", "/novelties", "no-key-of-this-server").json()["code"] == "unauthorized"
    assert ask(other, "GET", "/novelties", PREDICT).json()["code"] == "forbidden"
    again = ask(other, "GET", "/novelties", headers={"X-Openworld-Forwarded": "1"})
    assert (again.status_code, again.json()["code"]) == (503, "inbox_moved")
    assert "retry-after" in again.headers


def test_an_erasure_reaches_every_copy(fleet: Fleet) -> None:
    owner, other = fleet.owner, fleet.other
    image = novel_image(3)
    sha256 = sha256_bytes(image)
    ids = [predict(server, image)["id"] for server in (owner, other)]
    wait_until(lambda: listed(owner).get(sha256) == 2)
    erased = ask(other, "DELETE", f"/images/{sha256}")
    assert erased.status_code == 200, erased.text
    assert erased.json()["novelties"] == 1
    wait_until(lambda: sha256 not in listed(other))
    for server in (owner, other):
        wait_until(lambda: ask(server, "POST", "/novelties", json={"prediction_ids": ids}).status_code == 404)  # noqa: B023
    wait_until(lambda: not [found.key for found in fleet.storage.list("") if sha256 in found.key])
    with closing(connect(fleet.redis.url, decode=False)) as client:
        for key in client.scan_iter("*:recent:*"):
            assert image not in (client.get(key) or b"")  # one may expire after it was listed


def test_a_killed_owner_is_replaced_within_seconds_and_its_novelties_are_still_there(fleet: Fleet) -> None:
    owner, other = fleet.owner, fleet.other
    for number in (4, 5):
        predict(owner, novel_image(number))
        predict(other, novel_image(number))
    before = {sha256_bytes(novel_image(number)): 2 for number in (4, 5)}
    wait_until(lambda: before.items() <= listed(other).items())
    before = listed(other)
    with closing(connect(fleet.redis.url)) as client:
        [lease] = wait_until(lambda: list(client.scan_iter("*:inbox-owner")))
        owner.stop(signal.SIGKILL)
        assert client.pttl(lease) in (-2, *range(int(1000 * LEASE_SECONDS) + 1))  # -2: it has expired
    predict(other, novel_image(6))  # answers go on, and its record waits for the next owner
    wait_until(lambda: ask(other, "GET", "/novelties").status_code == 200, TAKE_OVER_SECONDS)
    wait_until(lambda: listed(other) == before | {sha256_bytes(novel_image(6)): 1})
    assert other.metric("openworld_inbox_missing") == 0
    assert check_folder(fleet.storage, None).problems == []
