"""`python -m benchmarks.while_training --json OUT`: latency while the same cores learn a task.

One client sends ten requests per second, first to an idle service, then while the trainer learns. `openworld up` starts
both. Bar: p99 at most twice its idle value.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

from benchmarks.machine import machine
from benchmarks.serving.figures import percentile
from benchmarks.serving.load import HOST, requests_of
from benchmarks.serving.made_images import write_images
from benchmarks.serving.process import free_port
from benchmarks.serving.workload import prepare
from service.client import Client

RATE = 10.0  # requests per second
IDLE_SECONDS = 20.0
NEW = (("dune", "fern", "coal"), ("brick", "wave", "snow"))
IMAGES = range(40)
LONGEST = 600.0  # time limit of a task, in seconds


async def _ask(port: int, requests: Sequence[bytes], until: Any) -> list[float]:
    """Send requests on a fixed schedule over one connection until stopped; return the latencies in seconds."""
    reader, writer = await asyncio.open_connection(HOST, port)
    found, number, started = [], 0, time.perf_counter()
    while not await asyncio.to_thread(until):
        await asyncio.sleep(max(0.0, started + number / RATE - time.perf_counter()))
        asked = time.perf_counter()
        writer.write(requests[number % len(requests)])
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"the service answered {head[:60]!r}")
        found.append(time.perf_counter() - asked)
        number += 1
    writer.close()
    return found


@contextmanager
def _up(data: Path, port: int, log: Path, **settings: str) -> Iterator[None]:
    environment = {**os.environ, "OPENWORLD_TRAIN_METRICS_PORT": "0", **settings}
    command = [sys.executable, "-m", "openworld", "up", "--data", str(data), "--port", str(port)]
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"http://{HOST}:{port}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"it did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    shares = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "slowest_ms": 1.0}
    return {"answers": len(seconds), **{n: round(1000 * percentile(seconds, share), 2) for n, share in shares.items()}}


def measure(settings: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        workload = prepare(work, None, None)
        port, log = free_port(), work / "up.log"
        with _up(workload.data, port, log, **settings), Client(f"http://{HOST}:{port}") as client:
            requests, _ = requests_of(workload.images, False, f"{HOST}:{port}")
            time.sleep(8)  # the trainer loads torch
            end = time.monotonic() + IDLE_SECONDS
            idle = asyncio.run(_ask(port, requests, lambda: time.monotonic() > end))
            rounds = []
            for number, names in enumerate(NEW):
                task = _teach(client, work / f"new {number}", names)
                started = time.monotonic()
                busy = asyncio.run(_ask(port, requests, lambda task=task: _ended(client, task)))
                rounds.append({"seconds_to_learn": round(time.monotonic() - started, 1), **_figures(busy)})
    before = _figures(idle)
    ratios = [round(found["p99_ms"] / before["p99_ms"], 2) for found in rounds]
    return {
        "machine": machine(),
        "settings": settings or "the defaults of `openworld up`",
        "idle": before,
        "while_learning": rounds,
        "p99_ratios": ratios,
        "bars": [{"bar": "p99 while learning at most twice the idle one", "found": ratios, "met": max(ratios) <= 2}],
    }


def _teach(client: Client, folder: Path, names: Sequence[str]) -> str:
    from openworld.commands.teach import zipped
    from tasks.batch import open_batch

    write_images(folder, names, IMAGES)
    with open_batch(folder) as batch, zipped((one.label, batch.read(one.sha256)) for one in batch.images) as file:
        return client.teach_zip(file).id


def _ended(client: Client, task: str) -> bool:
    found = client.task(task)
    if found.state in ("failed", "rejected"):
        raise RuntimeError(f"the task {found.state}: {found.reason}")
    return found.state == "published"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.while_training", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of `openworld up`")
    args = parser.parse_args()
    document = measure(dict(one.split("=", 1) for one in args.set))
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
