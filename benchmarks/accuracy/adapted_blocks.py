"""`python -m benchmarks.accuracy.adapted_blocks`: how many blocks of a transformer to adapt, by the number of images.

One task of five classes of CIFAR-10, learned with the last 1, 2, ... blocks adapted, or with the LayerNorms of all
blocks and adapters of one unit (`norms`). It is judged on other training images: in closed form, by the network alone,
and with the evidence of both. A finished row is in the file of the report, and the same command runs what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.cells import commit, prior_for
from benchmarks.accuracy.data import ImageSet
from benchmarks.accuracy.methods import Learning, answered, learn, settings_of
from benchmarks.accuracy.metrics import measure
from benchmarks.accuracy.streams import DEIT, Stream
from benchmarks.machine import machine
from models.files import write_durable
from models.network.backbone import open_backbone
from trainer.learning.reproducibility import configure_torch
from trainer.learning.tokens import TokenCache

DATA, CLASSES = "cifar10", 5
KNOWN, UNKNOWN = 100, 20  # test images per class
NORMS = "norms"
BACKBONES = {DEIT: DEIT, "vit_tiny_patch16_224": "vit_tiny_patch16_224_augreg"}  # and their files of weights


def one_task(images: ImageSet, per_class: int, order: int) -> Stream:
    """The first task of a class order, with training images that it does not learn as test images."""
    stream = Stream.make(images, 1, CLASSES, per_class, order)
    used = {key for keys in stream.tasks[0].values() for key in keys}
    rng = np.random.default_rng([order, 1])
    keys: list[str] = []
    labels: list[int] = []
    for c, name in enumerate(images.classes):
        known = name in stream.classes
        fresh = [key for key in images.pick("train", c, None, rng) if key not in used]
        chosen = rng.choice(fresh, KNOWN if known else UNKNOWN, replace=False).tolist()
        keys += chosen
        labels += [stream.classes.index(name) if known else -1] * len(chosen)
    return Stream(stream.tasks, keys, np.array(labels, np.int64))


def row(images: ImageSet, weights: Path, backbone: str, blocks: str, per_class: int, order: int, threads: int) -> Any:
    stream = one_task(images, per_class, order)
    given = {"bottleneck": 1} if blocks == NORMS else {"adapted_blocks": int(blocks)}
    # Without a cascade: the network alone is judged too, so it runs for every image.
    settings = settings_of("ours", order, prior_for(DATA)[0], threads=threads, cascade="off", **given)
    recipe = settings.recipe.model_copy(update={"networks": "always"})
    settings = settings.model_copy(update={"recipe": recipe})
    configure_torch(settings)
    found: dict[str, Any] = {}

    def on_learned(learning: Learning) -> None:
        known = stream.labels >= 0
        alone = learning.evidence.class_logits[known].argmax(axis=1) == stream.labels[known]
        steps = {"both": answered(learning.learned.model, learning.evidence, None, None)}
        if learning.provisional is not None:
            early = learning.provisional.model
            steps["closed form"] = answered(early, early.evidence(learning.test), None, None)
        figures = {name: measure([step], stream.labels).figures() for name, step in steps.items()}
        found.update({name: round(100 * float(own["last"] or 0), 1) for name, own in figures.items()})
        found.update({"network": round(100 * float(alone.mean()), 1), "seconds": round(learning.seconds, 1)})

    with tempfile.TemporaryDirectory() as folder:
        file = weights / f"{BACKBONES[backbone]}.safetensors"
        opened = open_backbone(Path(folder), backbone, file, settings.adapted_blocks)
        learn(TokenCache(opened, images.read), stream.tasks, stream.test_keys, settings, on_learned)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.adapted_blocks", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {DATA}.safetensors")
    parser.add_argument("--weights", type=Path, help="folder with the backbones' weights (default: beside --data)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the report")
    parser.add_argument("--backbones", default=",".join(BACKBONES), help="comma-separated (default: both)")
    parser.add_argument("--blocks", default=f"{NORMS},1,2,4,12", help=f"comma-separated (default {NORMS},1,2,4,12)")
    parser.add_argument("--images", default="5,20,50,200", help="per class, comma-separated (default 5,20,50,200)")
    parser.add_argument("--orders", type=int, default=1, help="class orders (default 1)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    images = ImageSet.load(args.data / f"{DATA}.safetensors")
    report = json.loads(args.out.read_text()) if args.out.is_file() else {"rows": []}
    chosen = product(args.backbones.split(","), map(int, args.images.split(",")), args.blocks.split(","))
    for (backbone, per_class, blocks), order in product(chosen, range(args.orders)):
        cell = {"backbone": backbone, "images": per_class, "blocks": blocks, "order": order}
        if any(cell.items() <= one.items() for one in report["rows"]):
            continue
        started = time.monotonic()
        found = row(
            images, args.weights or args.data.parent / "weights", backbone, blocks, per_class, order, args.threads
        )
        report["rows"].append({**cell, **found, "commit": commit(), "machine": machine()})
        write_durable(args.out, (json.dumps(report, indent=1) + "\n").encode())
        print(f"{cell}: {found}, {time.monotonic() - started:.0f} s in all", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
