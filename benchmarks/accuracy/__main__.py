"""`python -m benchmarks.accuracy`: the product, the published method and closed-form baselines on streams of tasks."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy import reference
from benchmarks.accuracy.cells import Runner, Setup
from benchmarks.accuracy.report import ABOUT, write
from benchmarks.accuracy.streams import SUITES, cells
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    suites = "\n".join(f"  {name:10} {suite.about}; {', '.join(suite.sets)}" for name, suite in SUITES.items())
    methods = "\n".join(f"  {name:20} {about}" for name, about in ABOUT.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        epilog=f"suites:\n{suites}\n\nmethods:\n{methods}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the image sets (safetensors)")
    parser.add_argument("--out", type=Path, required=True, help="folder for cells, tokens and the report")
    parser.add_argument("--suite", default="main", help="comma-separated (default: main)")
    parser.add_argument("--cells", default="", help="run only cells that match a pattern, comma-separated")
    parser.add_argument("--weights", type=Path, help="folder with DeiT's weights (default: weights beside --data)")
    parser.add_argument("--old", type=Path, help="a checkout of commit e6c0161, for product-v1")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report-only", action="store_true", help="only write the report of finished cells")
    parser.add_argument("--set", default="{}", help="JSON of learner settings, for a trial of this command")
    parser.add_argument("--reference", type=Path, default=reference.FILE, help="figures that suite short must reach")
    parser.add_argument("--write-reference", action="store_true", help="record the figures of suite short")
    parsed = parser.parse_args(argv)
    unknown = set(parsed.suite.split(",")) - SUITES.keys()
    if unknown:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    suites = args.suite.split(",")
    chosen = cells(suites, args.data, [pattern for pattern in args.cells.split(",") if pattern])
    setup = Setup(
        data=args.data,
        out=args.out,
        weights=args.weights or args.data.parent / "weights",
        old=args.old,
        threads=args.threads,
        given=json.loads(args.set),
    )
    failed = 0
    if not args.report_only:
        configure_torch(LearnerSettings(threads=args.threads))
        failed = Runner(setup).run(chosen)
    given = list(argv) if argv is not None else sys.argv[1:]
    for suite in suites:
        own = [cell for cell in chosen if cell.suite == suite and setup.file(cell).is_file()]
        if own:
            print(write(args.out, suite, [setup.file(cell) for cell in own], shlex.join(given)))
    dropped: list[str] = []
    if "short" in suites:
        files = [setup.file(cell) for cell in chosen if cell.suite == "short" and setup.file(cell).is_file()]
        if args.write_reference:
            reference.record(args.reference, files)
        else:
            dropped = reference.compare(args.reference, files)
    for line in dropped:
        print(f"dropped: {line}", file=sys.stderr)
    return 1 if failed or dropped else 0


if __name__ == "__main__":
    sys.exit(main())
