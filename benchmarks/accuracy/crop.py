"""`python -m benchmarks.accuracy.crop`: how much of an image the backbone should see, on training images only.

timm's evaluation transform crops the centre: 87.5 % of the short side for EfficientNet-Lite0, 90 % for DeiT. Each share
is judged like a frozen feature in `benchmarks.accuracy.transform`, by the closed-form scores of fresh training images.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.cells import commit
from benchmarks.accuracy.data import ImageSet, recorded_now
from benchmarks.accuracy.streams import ALL_SETS, DEIT, LITE0
from benchmarks.accuracy.transform import Figures, Split, judge, product_candidate, stored_parts, value
from models.network.backbone import Backbone
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings

FILE = Path(__file__).with_name("crops.json")
SHARES = (1.0, 0.875)  # of the short side; timm keeps the last for EfficientNet-Lite0


def with_share(backbone: Backbone, share: float) -> Backbone:
    """The backbone with images of which the crop keeps this share of the short side."""
    shown = replace(backbone.spec.preprocessing, resize=round(backbone.spec.preprocessing.crop / share))
    return replace(backbone, spec=replace(backbone.spec, preprocessing=shown))


def figures(backbone: Backbone, images: ImageSet, cache: Path, orders: int) -> list[Figures]:
    """Of the product's frozen feature, for each class order."""
    tokens, frozen = stored_parts(backbone, images, cache / "tokens"), backbone.spec.frozen
    splits = (Split.make(tokens, images, ALL_SETS[images.name], order) for order in range(orders))
    return [judge(product_candidate(backbone), split, frozen.parts, frozen.expanded) for split in splits]


def summary(found: Mapping[float, Mapping[str, Sequence[Figures]]]) -> dict[str, Any]:
    """By share: accuracy and AUC per data set, the mean of the scores and class orders, and the mean of all."""
    out: dict[str, Any] = {}
    for share, sets in found.items():
        rows = {
            name: {
                figure: round(float(np.mean([own[figure] for order in orders for own in order.values()])), 2)
                for figure in ("accuracy", "auc")
            }
            for name, orders in sets.items()
        }
        mean = np.mean([np.mean([value(order) for order in orders]) for orders in sets.values()])
        out[f"{share:g}"] = {"mean": round(float(mean), 2), "sets": rows}
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.crop", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the image sets (safetensors)")
    parser.add_argument("--out", type=Path, default=FILE, help=f"default {FILE.name} beside this file")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the features of images")
    parser.add_argument("--weights", type=Path, help="folder with DeiT's weights (default: weights beside --data)")
    parser.add_argument("--backbones", default=LITE0, help=f"comma-separated, others keep their entry (and {DEIT})")
    parser.add_argument("--sets", default=",".join(ALL_SETS), help="data sets, comma-separated (default: all four)")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of the short side, comma-separated")
    parser.add_argument("--orders", type=int, default=2, help="class orders per data set (default 2)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    configure_torch(LearnerSettings(threads=args.threads))
    weights = (args.weights or args.data.parent / "weights") / f"{DEIT}.safetensors"
    facts = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "orders": args.orders}
    entries: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in args.backbones.split(","):
        backbone = recorded_now(args.cache, name, weights if name == DEIT else None)
        found: dict[float, dict[str, list[Figures]]] = {}
        for data in args.sets.split(","):
            images = ImageSet.load(args.data / f"{data}.safetensors")
            for share in map(float, args.shares.split(",")):
                own = figures(with_share(backbone, share), images, args.cache, args.orders)
                found.setdefault(share, {})[data] = own
                print(f"{name}, {data}, {share:g} of the short side", file=sys.stderr, flush=True)
        entries[name] = {**facts, "shares": summary(found)}
        args.out.write_text(json.dumps(entries, indent=1) + "\n")
    print(args.out.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
