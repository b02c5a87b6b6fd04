"""`python -m benchmarks.first_task`: seconds from the first command to the first answer, with the offline default.

Runs `openworld learn` on 5 classes x 40 images in a new data folder, then `openworld predict`, and reports the seconds,
the accuracy on test images, and the share of images of other classes that are answered novel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.data import ImageSet
from benchmarks.machine import machine


def openworld(*words: str) -> tuple[float, str]:
    """(seconds, output) of one `openworld` command."""
    environment = {**os.environ, "OPENWORLD_BACKBONE": "tf_efficientnet_lite0"}
    started = time.monotonic()
    command = [sys.executable, "-m", "openworld", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return time.monotonic() - started, done.stdout


def save(images: ImageSet, split: str, label: int, count: int, folder: Path, rng: np.random.Generator) -> list[Path]:
    """Write `count` random images of a class as files."""
    folder.mkdir(parents=True)
    files = []
    for key in images.pick(split, label, count, rng):
        files.append(folder / f"{key.replace('/', '-')}.jpg")
        files[-1].write_bytes(images.read(key))
    return files


def measure(images: ImageSet, classes: int, per_class: int, seed: int, work: Path) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    order = [int(c) for c in rng.permutation(len(images.classes))]
    known, unknown = order[:classes], order[classes : 2 * classes]
    for label in known:
        save(images, "train", label, per_class, work / "task" / images.classes[label], rng)
    learn_seconds, _ = openworld("learn", str(work / "task"), "--data", str(work / "data"))
    test = {
        label: save(images, "test", label, 20, work / "test" / images.classes[label], rng)
        for label in order[: 2 * classes]
    }
    files = [str(file) for paths in test.values() for file in paths]
    predict_seconds, printed = openworld("predict", *files, "--data", str(work / "data"), "--json")
    answers = {answer["file"]: answer for answer in map(json.loads, printed.splitlines())}
    right = [answers[str(file)]["nearest"][0][0] == images.classes[label] for label in known for file in test[label]]
    flagged = [answers[str(file)]["novel"] for label in known for file in test[label]]
    novel = [answers[str(file)]["novel"] for label in unknown for file in test[label]]
    return {
        "images": classes * per_class,
        "learn_seconds": round(learn_seconds, 1),
        "predict_seconds": round(predict_seconds, 1),
        "predicted": len(files),
        "accuracy_of_nearest_class": float(np.mean(right)),
        "known_called_novel": float(np.mean(flagged)),
        "other_classes_called_novel": float(np.mean(novel)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_task", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="image set (safetensors)")
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--per-class", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(ImageSet.load(args.data), args.classes, args.per_class, args.seed, Path(folder))
    facts = {
        "data": args.data.stem,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "seed": args.seed,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**facts, **figures}, indent=1) + "\n")
    print(args.json.read_text(), end="")


if __name__ == "__main__":
    main()
