"""`python -m benchmarks.scaling --json OUT`: what the product costs as the number of learned tasks grows.

The serving part takes about rounds x numbers of tasks x configurations x (2.5 x seconds + 10 s), and first some minutes
to export the backbones. A plot is written beside the report.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.scaling import plot, serving
from benchmarks.scaling.made_models import CONFIGURATIONS

TASKS = (1, 5, 10, 20, 50)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="report file; the plot has its name with .png")
    parser.add_argument("--tasks", default=",".join(map(str, TASKS)), help="numbers of tasks (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default 8)")
    parser.add_argument("--clients", type=int, default=32, help="connections at saturation (default 32)")
    parser.add_argument("--weights", type=Path, help="folder with DeiT's safetensors file (default: random weights)")
    parser.add_argument("--add", action="store_true", help="keep the other configurations of an existing report")
    parser.add_argument("--only", action="append", choices=list(CONFIGURATIONS), help="measure these configurations")
    parsed = parser.parse_args(argv)
    try:
        parsed.tasks = sorted({int(number) for number in parsed.tasks.split(",")})
    except ValueError:
        parsed.tasks = []
    if not parsed.tasks or parsed.tasks[0] < 1 or parsed.rounds < 1 or parsed.clients < 1 or parsed.seconds <= 0:
        parser.error("tasks, rounds, clients, seconds: above 0")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    quiet = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        setup = serving.Setup(
            work=Path(folder),
            tasks=args.tasks,
            rounds=args.rounds,
            seconds=args.seconds,
            clients=args.clients,
            configurations=args.only or list(CONFIGURATIONS),
            weights=args.weights,
            say=lambda text: quiet.print(text),
        )
        found = serving.measure(setup)
    given = list(argv) if argv is not None else sys.argv[1:]
    commands = [f"python -m benchmarks.scaling {shlex.join(given)}"]
    if args.add and args.json.is_file():
        earlier = json.loads(args.json.read_text())
        commands = [*earlier["commands"], *commands]
        found = serving.merged(earlier["serving"], found)
    document = {
        "commands": commands,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "settings": {"rounds": args.rounds, "seconds": args.seconds, "clients": args.clients},
        "serving": found,  # learning: benchmarks.scaling.learning
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    plot.draw(found["configurations"], args.json.with_suffix(".png"))
    show(found, Console(highlight=False, width=None if sys.stdout.isatty() else 140))
    return 0


def show(found: serving.Figures, console: Console) -> None:
    for name, entry in found["configurations"].items():
        table = Table(title=f"{name}; limit {entry['limit_images_per_second']:.1f} images/s", title_justify="left")
        columns = ("tasks", "images/s", "of fewest", "of limit", "p50 ms", "p99 ms", "idle p50", "idle p99", "MiB")
        for column in (*columns, "swap s", "start s"):
            table.add_column(column, justify="right")
        for tasks, cell in entry["tasks"].items():
            idle, busy = cell["idle"], cell["saturated"]
            values = [busy["images_per_second"], cell["of_fewest_tasks"], cell["of_limit"]]
            values += [busy["p50_ms"], busy["p99_ms"], idle["p50_ms"], idle["p99_ms"]]
            values += [cell["memory_mib"], cell["swap_seconds"], cell["cold_start_seconds"]]
            table.add_row(tasks, *(f"{value:.2f}" for value in values))
        console.print(table)
    for line in found["bars"]:
        console.print(f"{'met' if line['met'] else 'NOT MET'}: {line['name']} {line['wanted']}: {line['found']:g}")


if __name__ == "__main__":
    sys.exit(main())
