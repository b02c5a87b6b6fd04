"""`python -m benchmarks.serving.compare --old CHECKOUT --json OUT`: this code against another checkout of it.

In turn (old, new, old, new, ...), both serve the same images with default settings, under the same load generator, and
learn the same small task with `openworld learn`. The old code learns the data folder, and the new code uses a copy,
as after an upgrade: how much an answer costs depends on what was learned.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine
from benchmarks.serving import contenders, run
from benchmarks.serving.made_images import write_images
from benchmarks.serving.peers import ROOT
from benchmarks.serving.report import bar
from benchmarks.serving.workload import Workload, openworld, prepare

LEAST = 0.97  # new throughput as a share of the old one
MOST = 1.03  # new seconds of learning, relative to the old ones
LEARNED, PER_CLASS = (
    ("brook", "cliff", "dune", "grove", "marsh"),
    range(20),
)  # the small task, after those that are served
# Names that both checkouts know: an unknown OPENWORLD_ variable stops the program.
SETTINGS = {"OPENWORLD_BACKBONE": "tf_efficientnet_lite0"}


def measure(old: Path, work: Path, rounds: int, seconds: float, clients: int) -> dict[str, Any]:
    (work / "old").mkdir()
    print("learning", file=sys.stderr)
    learned = prepare(work / "old", None, None, old.resolve(), SETTINGS)
    shutil.copytree(work / "old", work / "new")
    copied = Workload(work / "new" / learned.data.name, work / "new" / learned.images.name)
    plans = {
        "old": run.Plan(learned, work / "old", seconds, clients, lambda text: None, old.resolve()),
        "new": run.Plan(copied, work / "new", seconds, clients, lambda text: None, ROOT),
    }
    found: dict[str, list[run.Figures]] = {"old": [], "new": []}
    for number in range(rounds):
        for name, plan in plans.items():
            service = contenders.service(run.cores())
            command = service.variants[0].command
            variant = contenders.Variant({}, command, {"PYTHONPATH": str(plan.root)})
            figures = run.serve(plan, service, variant)
            figures["learning"] = learn(plan)
            found[name].append(figures)
            rate = figures["saturated"]["images_per_second"]
            took = f"{rate:.1f} images per second, learned in {figures['learning']['seconds']:.2f} s"
            print(f"round {number + 1} of {rounds}, {name}: {took}", file=sys.stderr)
    pairs = list(zip(found["old"], found["new"], strict=True))
    ratios = [new["saturated"]["images_per_second"] / before["saturated"]["images_per_second"] for before, new in pairs]
    learning = [new["learning"]["seconds"] / before["learning"]["seconds"] for before, new in pairs]
    learning_cpu = [new["learning"]["cpu_seconds"] / before["learning"]["cpu_seconds"] for before, new in pairs]
    fastest = {name: min(entry["learning"]["seconds"] for entry in entries) for name, entries in found.items()}
    idle = [new["idle"]["p50_ms"] / before["idle"]["p50_ms"] for before, new in pairs]
    cpu = [new["saturated"]["cpu_ms_per_image"] / before["saturated"]["cpu_ms_per_image"] for before, new in pairs]
    rates = {
        name: median(entry["saturated"]["images_per_second"] for entry in entries) for name, entries in found.items()
    }
    share = rates["new"] / rates["old"]
    return {
        "result": {
            "images_per_second": rates,
            "ratio_of_medians": round(share, 3),
            "bars": [
                bar("images per second, new / old", ratios, f">= {LEAST}", min(share, median(ratios)) >= LEAST),
                bar("seconds of learning, new / old", learning, f"<= {MOST}", median(learning) <= MOST),
            ],
            "fastest_learning_seconds": fastest,
            "learning_cpu_ratio": [round(value, 3) for value in learning_cpu],
            "idle_p50_ratio": [round(value, 3) for value in idle],
            "cpu_per_image_ratio": [round(value, 3) for value in cpu],
        },
        "rounds": found,
    }


def learn(plan: run.Plan) -> run.Figures:
    """`openworld learn` on a copy of the data folder. Other processes change its CPU seconds less than its seconds."""
    task, data = plan.work / "small task", plan.work / "copy"
    if not task.exists():
        write_images(task, LEARNED, PER_CLASS)
    shutil.copytree(plan.workload.data, data)
    started, cpu = time.monotonic(), _cpu_of_children()
    openworld(plan.root, SETTINGS, "learn", str(task), "--data", str(data))
    seconds, cpu = time.monotonic() - started, _cpu_of_children() - cpu
    shutil.rmtree(data)
    return {"seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3)}


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.compare", description=__doc__)
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the code to compare with")
    parser.add_argument("--json", type=Path, required=True, help="where the report goes")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default 10)")
    parser.add_argument("--clients", type=int, default=32, help="connections at saturation (default 32)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        measured = measure(args.old, Path(folder), args.rounds, args.seconds, args.clients)
    commits = {
        name: subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        for name, root in {"old": args.old, "new": ROOT}.items()
    }
    words = ["--json", str(args.json), "--rounds", f"{args.rounds}", "--seconds", f"{args.seconds:g}"]
    command = f"python -m benchmarks.serving.compare --old <{commits['old']}> {shlex.join(words)}"
    facts = {"command": command, "date": datetime.now(UTC).date().isoformat(), "machine": machine(), "commits": commits}
    args.json.write_text(json.dumps({**facts, **measured}, indent=1) + "\n")
    print(json.dumps(measured["result"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
