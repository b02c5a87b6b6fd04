"""`python -m benchmarks.serving.compare --old CHECKOUT --json OUT`: this code against another checkout of it.

Both serve the same images with default settings, in turn (old, new, old, new, ...), under the same load generator. Each
checkout learns its own data folder from the same images, because the format may differ between them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine
from benchmarks.serving import contenders, run
from benchmarks.serving.peers import ROOT
from benchmarks.serving.report import bar
from benchmarks.serving.workload import prepare

LEAST = 0.97  # new throughput as a share of the old one
# Names that both checkouts know: an unknown OPENWORLD_ variable stops the program.
SETTINGS = {"OPENWORLD_BACKBONE": "tf_efficientnet_lite0"}


def measure(old: Path, work: Path, rounds: int, seconds: float, clients: int) -> dict[str, Any]:
    plans = {}
    for name, root in {"old": old.resolve(), "new": ROOT}.items():
        (work / name).mkdir()
        print(f"{name}: learning", file=sys.stderr)
        workload = prepare(work / name, None, None, root, SETTINGS)
        plans[name] = run.Plan(workload, work / name, seconds, clients, lambda text: None, root)
    found: dict[str, list[run.Figures]] = {"old": [], "new": []}
    for number in range(rounds):
        for name, plan in plans.items():
            service = contenders.service(run.cores())
            command = service.variants[0].command
            variant = contenders.Variant({}, command, {"PYTHONPATH": str(plan.root)})
            figures = run.serve(plan, service, variant)
            found[name].append(figures)
            rate = figures["saturated"]["images_per_second"]
            print(f"round {number + 1} of {rounds}, {name}: {rate:.1f} images per second", file=sys.stderr)
    pairs = list(zip(found["old"], found["new"], strict=True))
    ratios = [new["saturated"]["images_per_second"] / before["saturated"]["images_per_second"] for before, new in pairs]
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
            "bars": [bar("images per second, new / old", ratios, f">= {LEAST}", min(share, median(ratios)) >= LEAST)],
            "idle_p50_ratio": [round(value, 3) for value in idle],
            "cpu_per_image_ratio": [round(value, 3) for value in cpu],
        },
        "rounds": found,
    }


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
