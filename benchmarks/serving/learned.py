"""`python -m benchmarks.serving.learned --set SET --out FOLDER`: a version that has really learned photographs.

Which networks of a transformer run depends on the images, so a version with random tasks says what an answer costs at
most. This learns tasks of 5 classes x 20 photographs of an image set with the product's defaults and writes test images
of learned and of other classes: `python -m benchmarks.serving --data FOLDER/data --images FOLDER/images` serves them.
The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy.data import ImageSet
from benchmarks.accuracy.streams import DEIT, Stream
from benchmarks.scaling.learning import CLASSES, IMAGES
from benchmarks.serving.peers import ROOT
from benchmarks.serving.workload import openworld

ASKED = 3  # test images per class


def write_tasks(images: ImageSet, tasks: int, out: Path) -> list[Path]:
    """A folder per task, with one sub-folder per class."""
    folders = []
    for number, task in enumerate(Stream.make(images, tasks, CLASSES, IMAGES, seed=0).tasks, start=1):
        folders.append(out / f"task {number}")
        for name, keys in task.items():
            own = folders[-1] / name.replace("/", " ")
            own.mkdir(parents=True, exist_ok=True)
            for place, key in enumerate(keys):
                (own / f"{place:02d}.jpg").write_bytes(images.read(key))
    return folders


def write_asked(images: ImageSet, out: Path) -> None:
    """Test images of all classes, learned or not."""
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    keys = [key for label in range(len(images.classes)) for key in images.pick("test", label, ASKED, rng)]
    for place, key in enumerate(keys):
        (out / f"{place:04d}.jpg").write_bytes(images.read(key))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.learned", description=__doc__)
    parser.add_argument("--set", type=Path, required=True, help="an image set (safetensors) with JPEG files")
    parser.add_argument("--out", type=Path, required=True, help="folder for tasks, images and data")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--backbone", default=DEIT)
    parser.add_argument("--weights", type=Path, help="safetensors file of the backbone's weights")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    args.out = args.out.resolve()  # the commands below run in the project's folder
    images = ImageSet.load(args.set)
    write_asked(images, args.out / "images")
    settings = {"OPENWORLD_BACKBONE": args.backbone}
    settings |= {"OPENWORLD_BACKBONE_WEIGHTS": str(args.weights.resolve())} if args.weights else {}
    settings |= {"OPENWORLD_TRAIN_THREADS": str(args.threads)} if args.threads else {}
    for folder in write_tasks(images, args.tasks, args.out):
        started = time.monotonic()
        openworld(ROOT, settings, "learn", str(folder), "--data", str(args.out / "data"))
        print(f"{folder.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
