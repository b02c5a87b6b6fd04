"""`python -m benchmarks.serving`: the service against a bare ONNX Runtime loop and other servers.

One run, one machine, the same model, images and threads for all of them. LitServe and BentoML get our ONNX predictor,
so that only the serving layer differs; FastAPI with torch is the usual first implementation. `--peers naive` gives
LitServe and BentoML that implementation too. Takes about
rounds x contenders x 3 x seconds, and first some minutes to learn a model and to install the peers (build/peers).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import machine
from benchmarks.scaling.made_models import CONFIGURATIONS, MadeVersions
from benchmarks.serving import contenders, peers, report, run, workload
from benchmarks.serving.contenders import BARE, SERVICE, Contender, Variant
from benchmarks.serving.process import NotServing
from service.container import CPU_BATCH
from service.settings import ServiceSettings

NOTES = [
    "LitServe and BentoML serve our ONNX predictor and our image reader: only the serving layer differs.",
    "They run on uvloop and httptools like the service, with their access logs off; the service logs every request, "
    "counts its metrics and keeps novel images in its inbox, as it does by default.",
    "Their workers have as many BLAS threads as ONNX Runtime threads; ours keeps its default.",
    "A peer's settings are the best of those tried, by images per second.",
    "`others`: cores taken by unrelated processes during the measurement.",
]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="report file")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds per measurement (default 15)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--clients", type=int, default=32, help="connections at saturation (default 32)")
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--data", type=Path, help="a data folder (default: learn a small model)")
    served.add_argument("--made", choices=list(CONFIGURATIONS), help="a version of this backbone with random tasks")
    parser.add_argument("--images", type=Path, help="a folder with JPEG files (default: generated)")
    parser.add_argument(
        "--peers", default="all", help=f"{', '.join(contenders.SETS)}, or some of {','.join(contenders.PEERS)}"
    )
    parser.add_argument("--tasks", type=int, default=10, help="how many random tasks (default 10)")
    parser.add_argument("--weights", type=Path, help="folder with DeiT's safetensors file (default: random weights)")
    parser.add_argument("--logs", type=Path, help="keep the contenders' logs in this folder")
    parsed = parser.parse_args(argv)
    sets = contenders.SETS
    parsed.peers = sets[parsed.peers] if parsed.peers in sets else parsed.peers.split(",")
    unknown = set(parsed.peers) - contenders.PEERS.keys()
    if unknown or parsed.rounds < 1 or parsed.clients < 1 or parsed.seconds <= 0:
        parser.error(f"unknown peer {', '.join(sorted(unknown))}" if unknown else "rounds, clients, seconds: above 0")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    quiet = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        document = measure(args, Path(folder), quiet)
    given = list(argv) if argv is not None else sys.argv[1:]
    overrides = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("OPENWORLD_")]
    document = {"command": " ".join([*overrides, "python -m benchmarks.serving", shlex.join(given)]), **document}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    report.show(document, Console(highlight=False, width=None if sys.stdout.isatty() else 140))
    return 0


def measure(args: argparse.Namespace, work: Path, console: Console) -> dict[str, Any]:
    """Measure all contenders and return the report."""
    console.print("preparing a model and images")
    data = args.data
    if args.made:
        data = work / "made version"
        MadeVersions(data, CONFIGURATIONS[args.made], args.weights).publish(args.tasks)
    prepared = workload.prepare(work, data, args.images)
    settings = ServiceSettings(data=prepared.data)
    plan = run.Plan(prepared, args.logs or work, args.seconds, args.clients, lambda text: console.print(text))
    plan.work.mkdir(parents=True, exist_ok=True)
    entries, chosen = _field(args.peers, plan, settings.threads)
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine() | {"usable_cores": run.cores(), "load_before": round(os.getloadavg()[0], 2)},
        "settings": {"seconds": args.seconds, "rounds": args.rounds, "clients": args.clients},
        "workload": prepared.facts(),
        "service_settings": settings.shown() | {"data": "..."},
        "notes": NOTES,
    }
    rounds: dict[str, list[run.Figures]] = {BARE: [], **{contender.name: [] for contender, _ in chosen}}
    for number in range(args.rounds):
        plan.say(f"round {number + 1} of {args.rounds}: {BARE}")
        rounds[BARE].append(run.bare(plan, settings.threads, settings.decode_threads, settings.batch_size or CPU_BATCH))
        for contender, variant in list(chosen):
            plan.say(f"round {number + 1} of {args.rounds}: {contender.name}")
            try:
                rounds[contender.name].append(run.serve(plan, contender, variant))
            except NotServing as error:
                if contender.name == SERVICE:
                    raise
                chosen.remove((contender, variant))
                entries[contender.name]["not_measured"] = str(error)
                del rounds[contender.name]
    for name, figures in rounds.items():
        entries[name]["rounds"] = figures
    return {**facts, "contenders": entries, "result": report.summarise(rounds)}


def _field(
    names: Sequence[str], plan: run.Plan, cores: int
) -> tuple[dict[str, dict[str, Any]], list[tuple[Contender, Variant]]]:
    """(report entries of all contenders, the measurable ones with their settings, the service first)."""
    entries: dict[str, dict[str, Any]] = {
        BARE: {"about": "decode and score in a loop, no server; the faster of two ways", "settings": {}}
    }
    chosen: list[tuple[Contender, Variant]] = []
    makers = {SERVICE: contenders.service} | {name: contenders.PEERS[name] for name in names}
    for name, make in makers.items():
        plan.say(f"{name}: getting ready")
        try:
            contender = make(cores)
            variant, tried = run.choose(plan, contender)
        except (peers.PeerUnavailable, NotServing) as error:
            entries[name] = {"not_measured": str(error)}
            continue
        chosen.append((contender, variant))
        entries[name] = {
            "about": contender.about,
            "settings": dict(variant.settings),
            "tried": tried,
            "versions": peers.versions(contender.python, contender.packages),
        }
    return entries, chosen


if __name__ == "__main__":
    sys.exit(main())
