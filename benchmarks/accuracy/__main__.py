"""`python -m benchmarks.accuracy`: MORE, its ablations and baselines on a stream of tasks."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.accuracy.data import ImageSet, Stream
from benchmarks.accuracy.report import markdown, write
from benchmarks.accuracy.run import METHODS, run
from benchmarks.machine import machine
from models.network.backbone import open_backbone
from trainer.learning.progress import Event
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    methods = "\n".join(f"  {name:20} {method.about}" for name, method in METHODS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        epilog=f"methods:\n{methods}\n\nEvery other setting of the learner comes from its OPENWORLD_ variable.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="image set (safetensors)")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--per-class", type=int, help="training images per class (default: all)")
    parser.add_argument("--test-per-class", type=int, help="test images per class (default: all)")
    parser.add_argument("--memory", type=int, default=200)
    parser.add_argument("--backbone", help="timm name (default: the learner's)")
    parser.add_argument("--weights", type=Path, help="its safetensors file")
    parser.add_argument("--adapted-blocks", type=int, help="blocks with adapters (default: all)")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="class order, samples and training")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, required=True, help="report file; .md and .png are written beside it")
    parsed = parser.parse_args(argv)
    unknown = set(parsed.methods.split(",")) - METHODS.keys()
    if unknown:
        parser.error(f"unknown method {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    return parsed


def show(event: Event) -> None:
    """Print progress on one line, replaced until the phase ends."""
    left = "" if event.seconds_left is None else f", {event.seconds_left:.0f} s left"
    loss = "" if event.loss is None else f", loss {event.loss:.3f}"
    end = "\n" if event.epoch == event.epochs else "\r"
    text = f"task {event.task}, {event.phase}: {event.epoch}/{event.epochs}{loss}{left}"
    print(f"{text:78}", end=end, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    images = ImageSet.load(args.data)
    stream = Stream.make(images, args.tasks, args.per_class, args.test_per_class, args.seed)
    settings = LearnerSettings(
        replay_size=args.memory, seed=args.seed, adapted_blocks=args.adapted_blocks, threads=args.threads
    )
    configure_torch(settings)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        backbone = open_backbone(Path(folder) / "data", args.backbone, args.weights, args.adapted_blocks)
        results, facts = run(backbone, images, stream, settings, args.methods.split(","), show)
    spec = backbone.spec
    given = list(argv) if argv is not None else sys.argv[1:]
    overrides = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("OPENWORLD_")]
    document = {
        "title": f"{images.name}, {args.tasks} tasks, {spec.name}, {spec.adapted_blocks} adapted blocks",
        "command": " ".join([*overrides, "python -m benchmarks.accuracy", shlex.join(given)]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "seconds": time.monotonic() - started,
        "backbone": spec.to_dict(),
        "settings": settings.model_dump(mode="json", exclude={"backbone_weights"}),
        "test_images": len(stream.test_keys),
        **facts,
    }
    write(args.json, document, results)
    print(markdown(document, results, args.json.with_suffix(".png").name))


if __name__ == "__main__":
    main()
