"""The serving part: what a server costs at each number of tasks, beside the limit, one configuration after the other.

A cell is one server on a version with T tasks: start, one client, many clients, memory, and a swap to a new version
with as many tasks. The numbers of tasks take turns within a round, because machines are noisy.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.scaling.made_models import CLASSES, CONFIGURATIONS, UNITS, MadeVersions
from benchmarks.serving import contenders, run
from benchmarks.serving.figures import medians
from benchmarks.serving.load import EXPECTED, HOST, PATH
from benchmarks.serving.made_images import make_image
from benchmarks.serving.process import family
from benchmarks.serving.report import bar
from benchmarks.serving.workload import Workload
from models.inference.answer import Answer
from models.inference.predictor import Predictor
from service.container import CPU_BATCH

NOTES = [
    "The tensors of the tasks are random: speed does not depend on their values. Each task has "
    f"{CLASSES} classes and {UNITS} active units per adapter.",
    "No image is novel, so the inbox takes no time. With a transformer, every image runs as many networks as the "
    "cascade allows; real images often run fewer.",
    "The limit is one frozen forward pass per image, without HTTP, decoding and tasks, one loop per core.",
    "A swap is timed from the end of publishing to the first answer of the new version. The server looks for it every "
    "0.05 s, in place of the notice by Redis.",
    "A cold start is timed from the start of the process to its first answer.",
]
IMAGES = 48
POLL_SECONDS = 0.05
SWAP_SECONDS = 60.0  # time limit
# Of the largest number of tasks to the smallest: images per second.
WANTED = {"offline default": 0.9, "DeiT-Ti, 2 blocks": 0.6, "DeiT-Ti, 12 blocks": 0.6}
MEMORY_PER_TASK, SWAP, COLD_START = 4.0, 1.0, 4.0  # MiB, seconds, seconds: bars of the offline default

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """The parameters of a run."""

    work: Path
    tasks: Sequence[int]
    rounds: int
    seconds: float
    clients: int
    configurations: Sequence[str]
    weights: Path | None
    say: Any


def measure(setup: Setup) -> Figures:
    """The report of all configurations."""
    images = [make_image(f"class {number}", number) for number in range(IMAGES)]
    return _report({name: _configuration(setup, name, images) for name in setup.configurations})


def merged(earlier: Figures, later: Figures) -> Figures:
    """The configurations of both reports; the later one has precedence."""
    every = {**earlier["configurations"], **later["configurations"]}
    return _report({name: every[name] for name in CONFIGURATIONS if name in every})


def _report(found: Mapping[str, Figures]) -> Figures:
    lines = [line for name in found for line in bars(name, found[name])]
    return {"notes": NOTES, "configurations": dict(found), "bars": lines}


def _configuration(setup: Setup, name: str, images: Sequence[bytes]) -> Figures:
    setup.say(f"{name}: exporting")
    folder = setup.work / name.replace(", ", "-").replace(" ", "-")
    made = MadeVersions(folder, CONFIGURATIONS[name], setup.weights)
    versions = {tasks: made.publish(tasks) for tasks in setup.tasks}
    plans = {tasks: _plan(setup, folder, made, tasks, versions[tasks], images) for tasks in setup.tasks}
    limits: list[float] = []
    cells: dict[int, list[Figures]] = {tasks: [] for tasks in setup.tasks}
    for number in range(setup.rounds):
        words = ["--data", str(folder), "--cores", str(run.cores()), "--batch", str(CPU_BATCH)]
        warm = max(1.0, setup.seconds / 5)
        limit = run.tool("benchmarks.scaling.limit", words, warm, setup.seconds)
        limits.append(float(limit["images_per_second"]))
        for tasks, plan in plans.items():
            made.store.activate(versions[tasks], "operator", "for a measurement")
            cells[tasks].append(_cell(plan, made, tasks, 1000 * (number + 1) + tasks))
            rate = cells[tasks][-1]["saturated"]["images_per_second"]
            setup.say(f"{name}, round {number + 1} of {setup.rounds}, {tasks} tasks: {rate:.1f} images per second")
    return summarise(limits, cells)


def _plan(
    setup: Setup, folder: Path, made: MadeVersions, tasks: int, version: int, images: Sequence[bytes]
) -> run.Plan:
    """The images with the labels that the version gives them offline."""
    target = setup.work / f"{folder.name}-{tasks}-images"
    target.mkdir()
    answers = Predictor.open(folder, version, "cpu").predict(images)
    expected = {}
    for number, (image, answer) in enumerate(zip(images, answers, strict=True)):
        (target / f"{number:04d}.jpg").write_bytes(image)
        expected[f"{number:04d}.jpg"] = answer.label if isinstance(answer, Answer) else None
    (target / EXPECTED).write_text(json.dumps(expected))
    return run.Plan(Workload(folder, target), setup.work, setup.seconds, setup.clients, setup.say)


def _cell(plan: run.Plan, made: MadeVersions, tasks: int, seed: int) -> Figures:
    service = contenders.service(run.cores())
    variant = contenders.Variant({}, service.variants[0].command, {"OPENWORLD_SERVE_POLL_SECONDS": str(POLL_SECONDS)})
    with run.started(plan, service, variant) as server:
        run.load(plan, service, server, plan.clients, plan.warm, 0.1)
        idle = run.load(plan, service, server, 1, plan.warm, plan.seconds)
        saturated = run.load(plan, service, server, plan.clients, plan.warm, plan.seconds)
        memory = sum(_memory(process) for process in family(server.process.pid))
        swap = _swap(server.port, plan.workload.first(), made, tasks, seed)
    return {
        "cold_start_seconds": server.start_seconds,
        "idle": idle,
        "saturated": saturated,
        "memory_mib": round(memory / 2**20, 1),
        "swap_seconds": round(swap, 3),
    }


def _memory(process: psutil.Process) -> int:
    info = process.memory_full_info()
    return int(getattr(info, "pss", 0) or info.rss)


def _swap(port: int, image: bytes, made: MadeVersions, tasks: int, seed: int) -> float:
    """Publish a version whose newest task is another one, and ask until it answers."""
    version = made.publish(tasks, newest=seed)
    started = time.perf_counter()
    connection = http.client.HTTPConnection(HOST, port, timeout=SWAP_SECONDS)
    while (now := time.perf_counter()) < started + SWAP_SECONDS:
        connection.request("POST", PATH, image, {"Content-Type": "image/jpeg"})
        answer = json.loads(connection.getresponse().read())
        if answer["predictions"][0]["version"] == version:
            connection.close()
            return time.perf_counter() - started
    raise RuntimeError(f"version {version} did not answer within {now - started:.0f} s")


def summarise(limits: Sequence[float], cells: Mapping[int, Sequence[Figures]]) -> Figures:
    """Medians over the rounds, and the images per second relative to the fewest tasks, round by round."""
    middle = {tasks: medians(rounds) for tasks, rounds in cells.items()}
    first = cells[min(cells)]
    ratios = {
        tasks: [_rate(own) / _rate(base) for own, base in zip(own_rounds, first, strict=True)]
        for tasks, own_rounds in cells.items()
    }
    return {
        "limit_images_per_second": round(median(limits), 2),
        "tasks": {
            str(tasks): {
                **middle[tasks],
                "of_fewest_tasks": round(median(ratios[tasks]), 3),
                "of_limit": round(middle[tasks]["saturated"]["images_per_second"] / median(limits), 3),
                "rounds": list(cells[tasks]),
            }
            for tasks in sorted(cells)
        },
    }


def _rate(figures: Figures) -> float:
    return float(figures["saturated"]["images_per_second"])


def bars(name: str, found: Figures) -> list[Figures]:
    """What must hold, from the fewest to the most tasks."""
    few, many = (found["tasks"][str(tasks)] for tasks in _ends(found))
    least = WANTED[name]
    ratio = float(many["of_fewest_tasks"])
    out = [bar(f"{name}: images/s, share of that with {_ends(found)[0]} tasks", [ratio], f">= {least}", ratio >= least)]
    if name != "offline default":
        return out
    growth = (many["memory_mib"] - few["memory_mib"]) / max(_ends(found)[1] - _ends(found)[0], 1)
    swap, cold = float(many["swap_seconds"]), float(many["cold_start_seconds"])
    return [
        *out,
        bar(f"{name}: MiB of memory per task", [growth], f"<= {MEMORY_PER_TASK:g}", growth <= MEMORY_PER_TASK),
        bar(f"{name}: seconds of a swap", [swap], f"< {SWAP:g}", swap < SWAP),
        bar(f"{name}: seconds of a cold start", [cold], f"< {COLD_START:g}", cold < COLD_START),
    ]


def _ends(found: Figures) -> tuple[int, int]:
    numbers = [int(tasks) for tasks in found["tasks"]]
    return min(numbers), max(numbers)
