"""`python -m benchmarks.scaling.costs --json OUT`: what a request, a task and a swap cost beside CPU time.

Starts the whole service (`openworld up`, offline default backbone) with a Redis server of its own and counts: commands
of Redis while nothing happens, per answered image and per learned task; memory of Redis per task; disk per task;
requests to an object store per swap, by a server that has the version before. Counts do not depend on other work of
the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import obstore
import redis
from obstore.store import MemoryStore

from benchmarks.accuracy.data import ImageSet
from benchmarks.machine import machine
from benchmarks.scaling.learning import learn, stream
from benchmarks.serving.load import HOST
from benchmarks.serving.process import free_port, running, stop
from models.inference.model_cache import ModelCache
from models.storage import LocalFiles, object_store
from models.storage.object_cache import ObjectCache
from models.storage.object_store import ObjectStorage
from models.versions.store import VersionStore
from openworld.migration import migrate
from openworld.up.embedded_redis import find_binary
from service.client import Client
from tasks.queue import connect

TASKS = 8  # of 5 classes x 20 images
IDLE_SECONDS = 30.0
PREDICTIONS = 500
FOLDERS = ("versions", "promotions", "tasks", "heads", "samples", "images", "cache")


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server with the options of docker-compose.yml."""
    port = free_port()
    options = ["--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction", "--save", ""]
    command = [str(find_binary()), "--bind", HOST, "--port", str(port), "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield f"redis://{HOST}:{port}/0"
    finally:
        stop(process)


class RedisCosts:
    """Commands and memory of a Redis server since the last look."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._calls, self._memory = self._look()

    def _look(self) -> tuple[Counter[str], int]:
        stats: dict[str, Any] = self._client.info("commandstats")
        calls = {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}
        memory: int = self._client.info("memory")["used_memory"]
        return Counter({name: count for name, count in calls.items() if name != "info"}), memory

    def since(self) -> tuple[Counter[str], int]:
        calls, memory = self._look()
        found = calls - self._calls, memory - self._memory
        self._calls, self._memory = calls, memory
        return found


def disk(data: Path) -> dict[str, int]:
    return {name: sum(path.stat().st_size for path in (data / name).rglob("*") if path.is_file()) for name in FOLDERS}


class CountingClient:
    """The functions of obstore, with the number of calls and of bytes read."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.requests, self.bytes_read = Counter[str](), 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(obstore, name)

        def counted(client: Any, *arguments: Any, **more: Any) -> Any:
            key = str(arguments[0]) if arguments else ""
            self.requests[f"{name} {key.partition('/')[0]}"] += 1
            found = function(client, *arguments, **more)
            if name == "get":
                self.bytes_read += found.meta["size"]
            return found

        return counted


def swap_costs(data: Path, work: Path) -> dict[str, Any]:
    """Requests of a server that has the version before the current one, from CURRENT to the loaded model.

    The versions are in an object store in memory: the requests are those of any other.
    """
    current = VersionStore(data).current_manifest()
    assert current is not None
    assert current.parent is not None
    client, memory = CountingClient(), MemoryStore()
    migrate(LocalFiles(data), ObjectStorage(memory, "memory:", work / "filled", ObjectCache(work / "filled", 2**30)))
    with patch.object(object_store, "obstore", client):
        store = VersionStore(ObjectStorage(memory, "memory:", work / "server", ObjectCache(work / "server", 2**30)))
        models = ModelCache(store)
        client.forget()
        before = models.load(current.parent)
        first = {"requests": dict(client.requests), "bytes": client.bytes_read}
        client.forget()
        after = models.load(store.current() or 0)
    assert (before.manifest.version, after.manifest.version) == (current.parent, current.version)
    return {"first": first, "swap": {"requests": dict(client.requests), "bytes": client.bytes_read}}


def measure(work: Path, tasks: int) -> dict[str, Any]:
    data, port = work / "data", free_port()
    images = ImageSet.made(5 * (tasks + 1), 20, 1)
    batches = list(stream(images))
    ready = f"GET /readyz HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
    with redis_server(work) as url, closing(connect(url)) as client:
        environment = {"OPENWORLD_PORT": str(port), "OPENWORLD_BACKBONE": "tf_efficientnet_lite0"}
        environment |= {"OPENWORLD_TRAIN_METRICS_PORT": "0", "OPENWORLD_REDIS_URL": url}
        command = [sys.executable, "-m", "openworld", "up", "--data", str(data)]
        with (
            running(command, environment, port, ready, work / "up.log", work),
            Client(f"http://{HOST}:{port}", timeout=60) as server,
        ):
            learn(server, data, *batches[0])  # exports the graphs and fills caches
            costs, before = RedisCosts(client), disk(data)
            for batch, tests in batches[1 : tasks + 1]:
                learn(server, data, batch, tests)
            calls, memory = costs.since()
            used = {name: round((size - before[name]) / tasks) for name, size in disk(data).items()}
            time.sleep(1)  # for what follows a task
            costs.since()
            time.sleep(IDLE_SECONDS)
            idle, _ = costs.since()
            image = batches[0][1][0][1]
            started = time.monotonic()
            for _ in range(PREDICTIONS):
                server.predict(image)
            seconds = time.monotonic() - started
            asked, _ = costs.since()
    idle_rate = idle.total() / IDLE_SECONDS
    return {
        "redis_commands_per_second_idle": round(idle_rate, 2),
        "redis_commands_idle": dict(idle.most_common(8)),
        "redis_commands_per_answer": round(max(0.0, asked.total() - idle_rate * seconds) / PREDICTIONS, 4),
        "redis_commands_per_task": round(calls.total() / tasks),
        "redis_commands_of_tasks": dict(calls.most_common(12)),
        "redis_bytes_per_task": round(memory / tasks),
        "disk_bytes_per_task": used,
        "object_store": swap_costs(data, work),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.costs", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--tasks", type=int, default=TASKS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="costs-") as folder:
        found = measure(Path(folder), args.tasks)
    facts = {
        "command": f"python -m benchmarks.scaling.costs --tasks {args.tasks}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "tasks": "5 classes x 20 images, generated",
    }
    args.json.write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
