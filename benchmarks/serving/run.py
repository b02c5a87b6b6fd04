"""Measure each contender alone on the machine, in rounds, because machines are noisy.

`others` is the number of cores that unrelated processes took during a measurement.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.serving import contenders
from benchmarks.serving.contenders import Contender, Variant
from benchmarks.serving.figures import Measured
from benchmarks.serving.load import FIELD, HOST, PATH
from benchmarks.serving.peers import ROOT
from benchmarks.serving.process import NotServing, Running, free_port, running
from benchmarks.serving.wire import form_request, raw_request
from benchmarks.serving.workload import Workload

SPARE_SECONDS = 90  # for start and end of a measuring process
BAR = ("sequential", "overlapped")  # the bare loops that the service is compared with
TRIAL_SHARE = 0.5  # of the measurement's seconds, to choose a peer's settings

Figures = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The parameters that all measurements of a run share."""

    workload: Workload
    work: Path
    seconds: float
    clients: int
    say: Callable[[str], None]
    root: Path = ROOT  # the checkout whose servers are started
    logs: dict[str, Path] = field(default_factory=dict)

    @property
    def warm(self) -> float:
        return max(1.0, self.seconds / 5)

    def log(self, name: str) -> Path:
        return self.logs.setdefault(name, self.work / f"{name}.log")


def bare(plan: Plan, threads: int, decoders: int, batch: int) -> Figures:
    """The loop without a server, in a child process."""
    words = ["--data", str(plan.workload.data), "--images", str(plan.workload.images)]
    words += ["--threads", str(threads), "--decoders", str(decoders), "--batch", str(batch)]
    others = Others()
    found: Figures = tool("benchmarks.serving.bare", words, plan.warm, plan.seconds, windows=4)
    best = max(BAR, key=lambda name: float(found[name]["images_per_second"]))
    taken, _ = others.end()
    return {**found, "fastest": best, **found[best], "others": taken}


def serve(plan: Plan, contender: Contender, variant: Variant) -> Figures:
    """One contender, idle and saturated."""
    with started(plan, contender, variant) as server:
        load(plan, contender, server, plan.clients, plan.warm, 0.1)  # warm up every worker
        idle = load(plan, contender, server, 1, plan.warm, plan.seconds)
        saturated = load(plan, contender, server, plan.clients, plan.warm, plan.seconds)
        if not (idle["images"] and saturated["images"]):
            raise NotServing(f"no image was answered in {plan.seconds:g} s: {idle['errors'] | saturated['errors']}")
        return {"start_seconds": server.start_seconds, "idle": idle, "saturated": saturated}


def choose(plan: Plan, contender: Contender) -> tuple[Variant, list[Figures]]:
    """The settings with the highest throughput, and the figures of all that were tried."""
    tried: list[tuple[Variant, Figures]] = []
    if len(contender.variants) == 1:
        return contender.variants[0], []
    for variant in contender.variants:
        plan.say(f"{contender.name}: trying {dict(variant.settings)}")
        entry: Figures = {"settings": dict(variant.settings)}
        try:
            with started(plan, contender, variant) as server:
                entry |= load(plan, contender, server, plan.clients, plan.warm, TRIAL_SHARE * plan.seconds)
        except NotServing as error:
            entry["failed"] = str(error)
        tried.append((variant, entry))
    working = [pair for pair in tried if pair[1].get("images")]
    if not working:
        raise NotServing(f"with no settings: {tried[0][1].get('failed', 'no image was answered')}")
    best = max(working, key=lambda pair: pair[1]["images_per_second"])[0]
    return best, [entry for _, entry in tried]


def started(plan: Plan, contender: Contender, variant: Variant) -> AbstractContextManager[Running]:
    """The contender in a process of its own, after its first answer."""
    port = free_port()
    host, image = f"{HOST}:{port}", plan.workload.first()
    request = form_request(host, PATH, image, FIELD) if contender.form else raw_request(host, PATH, image)
    environment = contenders.environment(variant, plan.workload.data, port, plan.work / "home")
    return running(variant.command, environment, port, request, plan.log(contender.name), plan.root)


def load(plan: Plan, contender: Contender, server: Running, clients: int, warm: float, seconds: float) -> Figures:
    """One load of so many connections on a running contender."""
    words = ["--port", str(server.port), "--images", str(plan.workload.images), "--clients", str(clients)]
    words += ["--form"] if contender.form else []
    others = Others(server.cpu_seconds)
    measured = Measured.from_dict(tool("benchmarks.serving.load", words, warm, seconds))
    taken, cpu = others.end()
    # Other load on the machine hardly changes CPU time per image, unlike throughput.
    cpu_ms = round(1000 * cpu / max(measured.answered, 1), 3)
    return measured.to_dict() | {"cpu_ms_per_image": cpu_ms, "others": taken}


def tool(module: str, words: Sequence[str], warm: float, seconds: float, windows: int = 1) -> Any:
    """Run a measuring process and parse the last line that it prints."""
    command = [sys.executable, "-m", module, *words, "--warm", str(warm), "--seconds", str(seconds)]
    limit = windows * (warm + seconds) + SPARE_SECONDS
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=limit, check=True)
    return json.loads(done.stdout.splitlines()[-1])


class Others:
    """Cores taken by unrelated processes between construction and `end`."""

    def __init__(self, server_cpu: Callable[[], float] = lambda: 0.0) -> None:
        self._server_cpu = server_cpu
        self._started, self._busy, self._own, self._server = time.monotonic(), _busy(), _own(), server_cpu()

    def end(self) -> tuple[float, float]:
        """The cores taken by others, and the server's CPU seconds."""
        seconds = time.monotonic() - self._started
        server = self._server_cpu() - self._server
        taken = (_busy() - self._busy) - (_own() - self._own) - server
        return round(max(0.0, taken / seconds), 2), server


def _busy() -> float:
    """Non-idle CPU seconds over all cores."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own() -> float:
    """CPU seconds of this process and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
