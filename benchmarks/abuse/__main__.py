"""`python -m benchmarks.abuse --json OUT`: a well-behaved client beside seven kinds of abuse, in two rounds.

Bars, for every attack: only 2xx for the well-behaved client; its p99 at most three times the idle one, or 100 ms; and
the resident memory of the server after the second round within 5 % of that after the first.

The server runs with its default settings and two keys, one of which the abuser has. The abuser is a process of its own
at the lowest priority, because it uses the same cores. The client sends one image after the other, every fifth on
a new connection.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.abuse.attacks import ATTACKS, Abuser, attack
from benchmarks.abuse.client import CLIENT_KEY, LEAD_SECONDS, RATE, ask, figures
from benchmarks.machine import machine
from benchmarks.overload import in_processes
from benchmarks.serving.load import HOST
from benchmarks.serving.made_images import write_images
from benchmarks.serving.process import free_port, running
from benchmarks.serving.workload import Workload, prepare
from models.versions.store import VersionStore
from openworld.up.embedded_redis import find_binary, redis_answers, redis_command, redis_url, socket_path
from service.client import Client

ABUSER_KEY = "abuser-key-0123456789"
KEYS = f"robot:predict+label:{CLIENT_KEY},abuser:predict+label+operate:{ABUSER_KEY}"
QUIET_SHARE, SETTLE_SECONDS = 0.05, 60.0  # of a core; the longest time to wait for it
MAX_RATIO, MIN_ALLOWED_MS, MEMORY_RATIO = 3.0, 100.0, 1.05


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """The address of a queue without a trainer: submitted tasks stay queued."""
    folder.mkdir()
    with socket_path(folder) as path:
        process = subprocess.Popen(redis_command(find_binary(), folder, path), stdout=subprocess.DEVNULL)
        try:
            while not redis_answers(path):
                time.sleep(0.05)
            yield redis_url(path)
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def server(workload: Workload, work: Path) -> Iterator[tuple[int, psutil.Process]]:
    with ExitStack() as stack:
        url, port = stack.enter_context(redis(work / "redis")), free_port()
        environment = {"OPENWORLD_KEYS": KEYS, "OPENWORLD_REDIS_URL": url, "OPENWORLD_PORT": str(port)}
        command = [sys.executable, "-m", "openworld", "serve", "--data", str(workload.data)]
        ready = f"GET /readyz HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
        log = work / "server.log"
        started = stack.enter_context(running(command, environment, port, ready, log, work))
        yield port, psutil.Process(started.process.pid)


def measure(names: Sequence[str], seconds: float, data: Path | None, images: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        workload = prepare(work, data, images)
        asked = [path.read_bytes() for path in sorted(workload.images.glob("*.jpg"))]
        with server(workload, work) as (port, process):
            abuser = Abuser(port, ABUSER_KEY, _queue_a_task(port, work), VersionStore(workload.data).versions())
            figures(in_processes((ask, port, asked, min(seconds, 5.0), None))[0])  # warms up
            idle = figures(in_processes((ask, port, asked, seconds, None))[0])
            rounds = [_round(names, abuser, asked, seconds, process) for _ in range(2)]
    return {
        "machine": machine(),
        "workload": {"seconds": seconds, "requests_per_second": RATE, "connections": _connections(names)},
        "idle": idle,
        "rounds": rounds,
        "bars": _bars(idle, rounds),
    }


def _round(
    names: Sequence[str], abuser: Abuser, asked: Sequence[bytes], seconds: float, process: psutil.Process
) -> dict[str, Any]:
    found = {}
    for name in names:
        begun = get_context("spawn").Event()
        client, attacked = in_processes(
            (ask, abuser.port, asked, seconds, begun), (attack, name, abuser, LEAD_SECONDS + seconds, begun)
        )
        _settle(process)
        found[name] = {**figures(client), "attack": attacked, "memory_mib": _memory(process)}
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    return {"attacks": found, "memory_mib": _memory(process), "descriptors": process.num_fds()}


def _settle(process: psutil.Process) -> None:
    """Wait until the server has finished what it accepted, for example the check of a batch."""
    end = time.monotonic() + SETTLE_SECONDS
    while process.cpu_percent(interval=2.0) > 100 * QUIET_SHARE and time.monotonic() < end:
        pass


def _memory(process: psutil.Process) -> float:
    size: int = process.memory_info().rss
    return round(size / 2**20, 1)


def _connections(names: Sequence[str]) -> dict[str, int]:
    return {name: ATTACKS[name][0] for name in names}


def _queue_a_task(port: int, work: Path) -> str:
    from openworld.commands.teach import zipped

    paths = write_images(work / "queued", ["dune"], range(2))
    pairs = [(label, path.read_bytes()) for label, found in paths.items() for path in found]
    with Client(f"http://{HOST}:{port}", CLIENT_KEY) as client, zipped(pairs) as file:
        return client.teach_zip(file).id


def _bars(idle: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    allowed = max(MAX_RATIO * idle["p99_ms"], MIN_ALLOWED_MS)
    bars = []
    for number, one in enumerate(rounds, start=1):
        for name, found in one["attacks"].items():
            others = {status: count for status, count in found["statuses"].items() if not status.startswith("2")}
            where = f"{name}, round {number}"
            bars.append({"bar": f"{where}: only 2xx", "found": others or "nothing else", "met": not others})
            p99 = found["p99_ms"]
            bars.append({"bar": f"{where}: p99 within {allowed:.0f} ms", "found": p99, "met": p99 <= allowed})
    first, second = (one["memory_mib"] for one in rounds)
    bar = f"memory after round 2 within {MEMORY_RATIO} of that after round 1"
    bars.append({"bar": bar, "found": round(second / first, 3), "met": second <= MEMORY_RATIO * first})
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=20, help="of each attack")
    parser.add_argument("--attack", action="append", choices=sorted(ATTACKS), help="only this one (may be repeated)")
    parser.add_argument("--data", type=Path, help="a data folder with a learned model (default: learn a small model)")
    parser.add_argument("--images", type=Path, help="a folder of JPEG files (default: generated)")
    args = parser.parse_args()
    document = measure(args.attack or list(ATTACKS), args.seconds, args.data, args.images)
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"idle": document["idle"], "bars": document["bars"]}, indent=1))


if __name__ == "__main__":
    main()
