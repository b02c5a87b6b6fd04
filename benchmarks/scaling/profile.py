"""`python -m benchmarks.scaling.profile --out FILE.md`: what takes the time of learning a task and of answering.

Learning: tasks of 5 classes x 20 images, in one process, with a provisional version each; the last task and one of the
first are profiled. With `--data` the images are photographs of image sets, otherwise they are generated. Answering: a
version with random tasks, batches of a server on one thread. The profiler itself adds time to small functions, so
shares count, not seconds.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.accuracy.data import ImageSet
from benchmarks.machine import machine
from benchmarks.scaling.learning import CLASSES, IMAGES, Labelled, mixed
from benchmarks.scaling.made_models import CONFIGURATIONS, MadeVersions
from benchmarks.serving.made_images import make_image
from models.inference.predictor import Predictor
from openworld.commands.teach import zipped
from service.container import CPU_BATCH
from tasks.batch import open_batch
from trainer.learning.progress import Event
from trainer.learning.settings import LearnerSettings
from trainer.publish import learn_batch

ROOT = Path(__file__).resolve().parents[2]
OURS = ("models", "tasks", "trainer", "service")
FEW = 3  # the task that is profiled beside the last one: the first ones export the backbone
BATCHES = 50  # of answering


def learn(data: Path, batch: Labelled, settings: LearnerSettings) -> dict[str, float]:
    """Learn one task; returns when each phase ended, in seconds."""
    started, ends = time.monotonic(), dict[str, float]()

    def on_event(event: Event) -> None:
        ends["own network" if event.phase.startswith("task ") else event.phase] = time.monotonic() - started

    with zipped(batch) as file, open_batch(file) as opened:
        learn_batch(
            data,
            opened,
            settings,
            on_event,
            provisional=True,
            on_provisional=lambda submission, version: ends.update(provisional=time.monotonic() - started),
        )
    return {**ends, "publishing": time.monotonic() - started}


def learning(tasks: int, sets: Sequence[ImageSet], data: Path) -> str:
    """The phases without the profiler, and the functions with it: two tasks of each, with few and with many."""
    # The task after the last numbered one is profiled: the profiler must not slow down those that are timed.
    batches = [batch for batch, _ in mixed(sets or [ImageSet.made(CLASSES * (tasks + 1), IMAGES, 1)])[: tasks + 1]]
    settings = LearnerSettings(backbone="tf_efficientnet_lite0")
    phases: dict[int, dict[str, float]] = {}
    profiles: dict[int, str] = {}
    for number, batch in enumerate(batches, start=1):
        if number in (FEW + 1, tasks + 1):
            profiles[number] = profiled(lambda batch=batch: learn(data, batch, settings))  # type: ignore[misc]
        else:
            phases[number] = learn(data, batch, settings)
        print(f"task {number}", file=sys.stderr, flush=True)
    lines = ["## Learning", "", "| phase, seconds | " + " | ".join(f"task {n}" for n in (FEW, tasks)) + " |"]
    lines += ["| --- | ---: | ---: |"]
    for name in phases[tasks]:
        lines.append(f"| {name} | " + " | ".join(f"{_length(phases[n], name):.2f}" for n in (FEW, tasks)) + " |")
    totals = [phases[n]["publishing"] for n in (FEW, tasks)]
    lines += [f"| all | {totals[0]:.2f} | {totals[1]:.2f} |", ""]
    for number, table in profiles.items():
        lines += [f"Task {number}, own functions by the time in them and in what they call:", "", table, ""]
    return "\n".join(lines)


def _length(ends: dict[str, float], phase: str) -> float:
    """From the end of the phase before."""
    earlier = [end for name, end in ends.items() if name != phase and end <= ends.get(phase, 0.0)]
    return ends.get(phase, 0.0) - max(earlier, default=0.0)


def serving(name: str, tasks: Sequence[int], work: Path, weights: Path | None) -> str:
    """Batches on one thread, as one of a server's engine threads computes them."""
    made = MadeVersions(work / name.replace(", ", "-").replace(" ", "-"), CONFIGURATIONS[name], weights)
    images = [make_image(f"class {number}", number) for number in range(CPU_BATCH)]
    lines = [f"## Answering: {name}", ""]
    for number in tasks:
        version = made.publish(number)
        predictor = Predictor.open(made.store.root, version, "cpu", threads=1)
        predictor.predict(images)

        def batches(predictor: Predictor = predictor) -> None:
            for _ in range(BATCHES):
                predictor.predict(images)

        started = time.monotonic()
        batches()
        per_image = 1000 * (time.monotonic() - started) / BATCHES / CPU_BATCH
        table = profiled(batches)
        lines += [f"{number} tasks: {per_image:.2f} ms per image in batches of {CPU_BATCH}, one thread.", "", table, ""]
    return "\n".join(lines)


def profiled(call: Callable[[], object], rows: int = 24) -> str:
    """A table of our functions that take the most time, with what they call."""
    profile = cProfile.Profile()
    profile.enable()
    call()
    profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = max(cumulative for _, _, _, cumulative, _ in stats.values())
    found = [
        (cumulative, own, calls, f"{Path(file).relative_to(ROOT)}: {function}")
        for (file, _, function), (_, calls, own, cumulative, _) in stats.items()
        if file.startswith(tuple(f"{ROOT}{os.sep}{package}{os.sep}" for package in OURS))
    ]
    runs = [(c, o, n, f"ONNX Runtime: {f}") for (_, _, f), (_, n, o, c, _) in stats.items() if "onnxruntime" in f]
    lines = ["| function | calls | with what it calls | alone |", "| --- | ---: | ---: | ---: |"]
    for cumulative, own, calls, function in sorted([*found, *runs], reverse=True)[:rows]:
        lines.append(f"| {function} | {calls} | {100 * cumulative / total:.1f} % | {100 * own / total:.1f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.profile", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file of the report")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="image sets (default: generated images)")
    parser.add_argument("--tasks", type=int, default=50, help="of the larger version (default 50)")
    parser.add_argument("--weights", type=Path, help="folder with DeiT's safetensors file (default: random weights)")
    parser.add_argument("--skip-learning", action="store_true")
    args = parser.parse_args()
    where = machine()
    named = [Path(word).name if "/" in word else word for word in sys.argv[1:]]  # no path of this machine
    parts = [f"# Profiles\n\n`{' '.join(['python -m benchmarks.scaling.profile', *named])}`\n"]
    parts += [f"{where['cpu']}, {where['cores']} cores. Shares are of the profiled call.\n"]
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        if not args.skip_learning:
            sets = [ImageSet.load(path) for path in args.data]
            parts.append(learning(args.tasks, sets, Path(folder) / "data"))
        parts += [serving(name, (1, args.tasks), Path(folder), args.weights) for name in CONFIGURATIONS]
    args.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
