"""`python -m benchmarks.scaling.learning --json OUT`: what a further task costs as the number of learned tasks grows.

Starts the whole service (`openworld up`, defaults, offline default backbone) on a new data folder and submits one task
of 5 classes x 20 images after the other. Of each task, from `POST /tasks`: the seconds to the first right answer to a
test image of a new class, which a provisional version gives, and to the first answer of the version that has learned
the task. With `--data` the images are photographs of one or more image sets, whose tasks are mixed, otherwise they are
generated. The first tasks are measured once more at the end, in a second service.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.accuracy.data import ImageSet
from benchmarks.machine import machine
from benchmarks.serving.load import HOST
from benchmarks.serving.process import family, free_port, running
from models.versions.store import VersionStore
from openworld.commands.teach import zipped
from service.client import Client
from service.wire.predictions import Prediction

CLASSES, IMAGES = 5, 20  # per task, per class
# Tasks whose figures give a median. The first one exports the backbone. Few tasks are measured before and after the
# others, each time in a new service: a machine may become slower while this runs.
FEW, MANY = slice(1, 4), slice(-10, None)
POLL_SECONDS = 0.1
TASK_SECONDS = 600.0  # time limit
# Bars: seconds at the most and the fewest tasks, and their ratio.
PROVISIONAL_FEW, PROVISIONAL_MANY, REFINED_MANY, REFINED_RATIO = 3.0, 5.0, 15.0, 1.3


@contextmanager
def service(work: Path) -> Iterator[tuple[int, int]]:
    """(port, process id) of `openworld up`."""
    port = free_port()
    environment = {"OPENWORLD_PORT": str(port), "OPENWORLD_BACKBONE": "tf_efficientnet_lite0"}
    environment |= {"OPENWORLD_TRAIN_METRICS_PORT": "0"}
    command = [sys.executable, "-m", "openworld", "up", "--data", str(work / "data")]
    ready = f"GET /readyz HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
    with running(command, environment, port, ready, work / "up.log", work) as started:
        yield port, started.process.pid


Labelled = list[tuple[str, bytes]]


def stream(images: ImageSet) -> Iterator[tuple[Labelled, Labelled]]:
    """Of each task: (labelled images, one test image of each class with its label)."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(images.classes)).tolist()
    for task in range(len(order) // CLASSES):
        labels = order[task * CLASSES : (task + 1) * CLASSES]
        names = [(f"{images.classes[label]} {label}", label) for label in labels]
        batch = [(n, images.read(key)) for n, label in names for key in images.pick("train", label, IMAGES, rng)]
        yield batch, [(name, images.read(images.pick("test", label, 1, rng)[0])) for name, label in names]


def mixed(sets: Sequence[ImageSet]) -> list[tuple[Labelled, Labelled]]:
    """The tasks of all sets, evenly mixed: the first ones are compared with the last, and large images take longer."""
    every = [list(stream(images)) for images in sets]
    placed = [((k + 0.5) / len(own), number, k) for number, own in enumerate(every) for k in range(len(own))]
    return [every[number][k] for _, number, k in sorted(placed)]


def learn(client: Client, data: Path, batch: Labelled, tests: Labelled) -> dict[str, Any]:
    before = set(data.glob("*/*"))
    with zipped(batch) as file:
        started = time.monotonic()
        id = client.teach_zip(file).id
    provisional = _seconds_until(client, tests, started, lambda answer, name: answer.label == name)
    task = client.task(id)
    while task.state not in ("published", "rejected", "failed", "cancelled"):
        if time.monotonic() - started > TASK_SECONDS:
            raise SystemExit(f"task {id} is {task.state} after {TASK_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
        task = client.task(id)
    if task.state != "published" or task.version is None:
        raise SystemExit(f"task {id} is {task.state}: {task.reason}")
    learned = task.version
    refined = _seconds_until(client, tests, started, lambda answer, name: answer.version >= learned)
    manifest = VersionStore(data).manifest(task.version)
    own = max(manifest.files, key=lambda role: (role.startswith("task."), len(role), role))
    added = sum(path.stat().st_size for path in data.glob("*/*") if path.is_file() and path not in before)
    return {
        "provisional_seconds": provisional,
        "refined_seconds": refined,
        "task_bytes": manifest.files[own].size,
        "bytes_written": added,  # both versions; without images and the cache of features
        "adapter_units": (task.result or {}).get("capacity", {}).get("bottleneck"),
    }


def _seconds_until(client: Client, tests: Labelled, started: float, holds: Callable[[Prediction, str], bool]) -> float:
    """Until this holds of the answer to one of the test images and its label."""
    for name, image in cycle(tests):
        if holds(client.predict(image), name):
            return round(time.monotonic() - started, 2)
        if time.monotonic() - started > TASK_SECONDS:
            break
        time.sleep(POLL_SECONDS)  # more questions would slow down what is measured
    raise SystemExit("no such answer: see up.log")


def measure(tasks: Sequence[tuple[Labelled, Labelled]], work: Path) -> list[dict[str, Any]]:
    out = []
    work.mkdir(parents=True, exist_ok=True)
    with service(work) as (port, pid), Client(f"http://{HOST}:{port}", timeout=60) as client:
        for number, (batch, tests) in enumerate(tasks, start=1):
            found = learn(client, work / "data", batch, tests)
            found["memory_mib"] = {name: round(size) for name, size in _memory(pid).items()}
            out.append({"tasks": number, **found})
            print(json.dumps(out[-1]), file=sys.stderr, flush=True)
    return out


def _memory(pid: int) -> dict[str, float]:
    """Resident memory of server and trainer."""
    out = {}
    for process in family(pid):
        words = process.cmdline()
        for name in ("serve", "train"):
            if name in words:
                out[name] = float(process.memory_info().rss) / 2**20
    return out


def summarise(rows: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first tasks, also those that were measured again, against the last."""

    def of(part: Sequence[dict[str, Any]], name: str) -> float:
        return round(float(median(row[name] for row in part)), 2)

    first, last = [*rows[FEW], *again[FEW]], rows[MANY]
    few, many = (of(part, "provisional_seconds") for part in (first, last))
    refined_few, refined_many = (of(part, "refined_seconds") for part in (first, last))
    bars = [
        ("seconds to a provisional answer with few tasks", few, PROVISIONAL_FEW),
        ("seconds to a provisional answer with many tasks", many, PROVISIONAL_MANY),
        ("seconds to a learned answer with many tasks", refined_many, REFINED_MANY),
        ("the same, of that with few tasks", round(refined_many / refined_few, 2), REFINED_RATIO),
    ]
    return {
        "first_tasks": [row["tasks"] for row in rows[FEW]],
        "last_tasks": [row["tasks"] for row in rows[MANY]],
        "bars": [{"bar": name, "found": found, "allowed": most, "met": found <= most} for name, found, most in bars],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.learning", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--data", type=Path, nargs="+", help="image sets (safetensors); default: generated images")
    parser.add_argument("--tasks", type=int, default=50)
    args = parser.parse_args()
    sets = [ImageSet.load(path) for path in args.data or ()] or [ImageSet.made(CLASSES * args.tasks, IMAGES, 1)]
    tasks = mixed(sets)[: args.tasks]
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        rows = measure(tasks, Path(folder) / "all")
        again = measure(tasks[: FEW.stop], Path(folder) / "first")
    facts = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "images": [one.name for one in sets]}
    document = {**facts, **summarise(rows, again), "tasks": rows, "first_tasks_again": again}
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["bars"], indent=1))


if __name__ == "__main__":
    main()
