"""`python -m benchmarks.replicas --json OUT`: images per second through a balancer with 1, 2 and 3 servers.

The servers have default settings and share the cores of this machine, so the cost model of docs/scaling.md predicts
the same total for each number of servers: what one server answers. Each number is measured in turn, in several rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine
from benchmarks.serving import contenders, run
from benchmarks.serving.process import Running, family, free_port
from benchmarks.serving.workload import prepare
from deploy.fleet.balancer import start_balancer
from deploy.fleet.programs import stop_processes

NUMBERS = (1, 2, 3)
MEDIANS = ("images_per_second", "p50_ms", "p99_ms", "cpu_ms_per_image", "balancer_cores", "memory_mib")


@dataclass(frozen=True)
class Balanced(Running):
    """Servers behind a balancer. The CPU seconds are those of the servers."""

    servers: Sequence[Running] = ()

    def cpu_seconds(self) -> float:
        return sum(server.cpu_seconds() for server in self.servers)

    def balancer_seconds(self) -> float:
        return float(sum(sum(process.cpu_times()[:2]) for process in family(self.process.pid)))

    def memory(self) -> int:
        return sum(int(process.memory_info().rss) for server in self.servers for process in family(server.process.pid))


@contextmanager
def replicas(plan: run.Plan, number: int, folder: Path) -> Iterator[Balanced]:
    service = contenders.service(run.cores())
    with ExitStack() as stack:
        servers = [stack.enter_context(run.started(plan, service, service.variants[0])) for _ in range(number)]
        port = free_port()
        balancer = start_balancer(folder, port, [server.port for server in servers])
        stack.callback(stop_processes, [balancer])
        yield Balanced(balancer, port, 0.0, servers)  # type: ignore[arg-type]


def measure(plan: run.Plan, rounds: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {str(number): [] for number in NUMBERS}
    for turn in range(rounds):
        for number in NUMBERS:
            with replicas(plan, number, plan.work / f"nginx-{turn}-{number}") as balanced:
                service = contenders.service(run.cores())
                run.load(plan, service, balanced, plan.clients, plan.warm, 0.1)
                before, wall = balanced.balancer_seconds(), time.monotonic()
                figures = run.load(plan, service, balanced, plan.clients, plan.warm, plan.seconds)
                figures["balancer_cores"] = round((balanced.balancer_seconds() - before) / (time.monotonic() - wall), 3)
                figures["memory_mib"] = round(balanced.memory() / 2**20)
            found[str(number)].append(figures)
            print(f"round {turn + 1}, {number} servers: {figures['images_per_second']:.1f} images/s", file=sys.stderr)
    return found


def summarise(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians. The total that the cost model predicts for several servers is that of one."""
    middle = {name: {key: median(one[key] for one in entries) for key in MEDIANS} for name, entries in found.items()}
    predicted = middle["1"]["images_per_second"]
    return {
        "median": middle,
        "predicted_images_per_second": predicted,
        "measured / predicted": {name: round(one["images_per_second"] / predicted, 3) for name, one in middle.items()},
        "most_taken_by_others": max(one["others"] for entries in found.values() for one in entries),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the report goes")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default 8)")
    parser.add_argument("--clients", type=int, default=32, help="connections (default 32)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        workload = prepare(Path(folder), None, None)
        plan = run.Plan(workload, Path(folder), options.seconds, options.clients, lambda text: None)
        found = measure(plan, options.rounds)
    command = f"python -m benchmarks.replicas --json OUT --rounds {options.rounds} --seconds {options.seconds:g}"
    facts = {"command": command, "date": datetime.now(UTC).date().isoformat(), "machine": machine()}
    report = {**facts, "result": summarise(found), "rounds": found}
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["result"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
