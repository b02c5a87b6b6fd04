"""`python -m benchmarks.overload --json OUT`: load at four times the capacity for half a minute.

Bars: only 2xx, 429 and 504, every 429 with `Retry-After`; p99 of accepted requests at most queue limit / throughput;
`/livez` within 100 ms throughout; idle latency afterwards as before.

Requests are sent on a schedule without waiting for earlier responses (open loop). The load generator and the `/livez`
probe are separate processes on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.serving import contenders
from benchmarks.serving.figures import percentile
from benchmarks.serving.load import HOST, PATH, requests_of, run
from benchmarks.serving.process import free_port, running
from benchmarks.serving.run import cores
from benchmarks.serving.wire import raw_request
from benchmarks.serving.workload import prepare
from service.settings import ServiceSettings

TIMES = 4.0
CLIENTS = 32
LIVEZ_EVERY = 0.05
ALLOWED = {200, 429, 504}


class OpenLoop:
    """Send requests on a fixed schedule over as many keep-alive connections as needed; record the responses."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._port, self._requests = port, requests
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.statuses: Counter[int] = Counter()
        self.accepted: list[float] = []  # latencies of accepted requests, in seconds
        self.without_retry_after = 0

    async def run(self, rate: float, seconds: float) -> None:
        started, tasks = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self._ask(self._requests[number % len(self._requests)])))
        await asyncio.gather(*tasks)
        for _, writer in self._idle:
            writer.close()

    async def _ask(self, request: bytes) -> None:
        started = time.perf_counter()
        try:
            connection = self._idle.pop() if self._idle else await asyncio.open_connection(HOST, self._port)
            reader, writer = connection
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            self.statuses[0] += 1  # no response
            return
        status = int(head.split()[1])
        self.statuses[status] += 1
        if status == 200:
            self.accepted.append(time.perf_counter() - started)
        elif status == 429:
            self.without_retry_after += b"retry-after:" not in head
        self._idle.append(connection)


def _overload(port: int, images: Path, rate: float, seconds: float, results: Any) -> None:
    loop = OpenLoop(port, requests_of(images, False, f"{HOST}:{port}")[0])
    asyncio.run(loop.run(rate, seconds))
    results.put((dict(loop.statuses), loop.accepted, loop.without_retry_after))


def _livez(port: int, seconds: float, results: Any) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        connection.request("GET", "/livez")
        connection.getresponse().read()
        found.append(time.perf_counter() - started)
        time.sleep(LIVEZ_EVERY)
    results.put(found)


def in_processes(*jobs: tuple[Any, ...]) -> list[Any]:
    """Run each job in its own process, concurrently; return the results in order."""
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue() for _ in jobs]
    processes = [context.Process(target=job[0], args=(*job[1:], q)) for job, q in zip(jobs, queues, strict=True)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=300) for queue in queues]
    for process in processes:
        process.join(30)
    return results


def measure(seconds: float, data: Path | None, images: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        workload = prepare(Path(folder), data, images)
        contender = contenders.service(cores())
        variant, port = contender.variants[0], free_port()
        environment = contenders.environment(variant, workload.data, port, Path(folder))
        ready = raw_request(f"{HOST}:{port}", PATH, workload.first())
        log = Path(folder) / "service.log"
        with running(variant.command, environment, port, ready, log, Path(folder)):
            asked = requests_of(workload.images, False, f"{HOST}:{port}")
            idle = asyncio.run(run(port, *asked, clients=1, warm=1, seconds=4)).to_dict()
            full = asyncio.run(run(port, *asked, clients=CLIENTS, warm=2, seconds=8)).to_dict()
            capacity = full["images_per_second"]
            (statuses, accepted, bare), livez = in_processes(
                (_overload, port, workload.images, TIMES * capacity, seconds), (_livez, port, seconds)
            )
            after = asyncio.run(run(port, *asked, clients=1, warm=1, seconds=4)).to_dict()
    limit = ServiceSettings.model_fields["images_in_flight"].default
    # Throughput under this load: the load generator uses the same cores.
    throughput = len(accepted) / seconds
    allowed_p99, p99 = limit / throughput, percentile(accepted, 0.99)
    others = {status: count for status, count in statuses.items() if status not in ALLOWED}
    return {
        "machine": machine(),
        "workload": {"seconds": seconds, "times_capacity": TIMES, "queue_limit": limit},
        "capacity_images_per_second": capacity,
        "offered_images_per_second": round(TIMES * capacity, 1),
        "answers": {str(status): count for status, count in sorted(statuses.items())},
        "accepted": {"per_second": round(throughput, 1), "p50_s": percentile(accepted, 0.5), "p99_s": p99},
        "livez": {"count": len(livez), "p50_ms": 1000 * percentile(livez, 0.5), "max_ms": 1000 * max(livez)},
        "idle_before": idle,
        "idle_after": after,
        "bars": [
            {"bar": "only 2xx, 429 and 504", "found": others or "nothing else", "met": not others},
            {"bar": "every 429 has Retry-After", "found": f"{bare} without", "met": bare == 0},
            {"bar": f"accepted p99 within {allowed_p99:.2f} s", "found": round(p99, 3), "met": p99 <= allowed_p99},
            {"bar": "/livez within 100 ms", "found": round(1000 * max(livez), 1), "met": max(livez) <= 0.1},
            {
                "bar": "p50 afterwards within 1.5 of that before",
                "found": round(after["p50_ms"] / idle["p50_ms"], 2),
                "met": after["p50_ms"] <= 1.5 * idle["p50_ms"],
            },
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--data", type=Path, help="a data folder with a learned model (default: learn a small model)")
    parser.add_argument("--images", type=Path, help="a folder of JPEG files (default: generated)")
    args = parser.parse_args()
    document = measure(args.seconds, args.data, args.images)
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: document[name] for name in ("answers", "accepted", "livez", "bars")}, indent=1))


if __name__ == "__main__":
    main()
