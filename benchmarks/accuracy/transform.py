"""`python -m benchmarks.accuracy.transform`: choose the frozen feature of each backbone, on training images only.

A candidate is a set of the backbone's outputs, a transform and a scaling. Each is judged by the closed-form scores of
the frozen feature (models/inference/frozen.py) after learning a part of the classes: accuracy on fresh images of these,
and AUC against images of the other classes. The product's own candidate is replaced only by one that is clearly better,
because learned models do not work with another frozen feature.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.accuracy.cells import ROOT, commit, source_hash
from benchmarks.accuracy.data import ImageSet, StoredTokens, recorded_now
from benchmarks.accuracy.metrics import Step, measure
from benchmarks.accuracy.prior import training_stream
from benchmarks.accuracy.streams import ALL_SETS, DEIT, LITE0
from models.files import write_durable
from models.inference.evidence import Floats
from models.inference.frozen import FrozenStatistics
from models.network.backbone import Backbone
from models.network.frozen_feature import projection
from models.versions.backbone_spec import FrozenPart
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings

FILE = Path(__file__).with_name("transforms.json")
SETS = {LITE0: tuple(ALL_SETS), DEIT: ("cifar10", "grocery_store", "caltech")}
PER_CLASS = 20
MOST_NOVEL = {"tiny_imagenet": (60, 5)}  # classes, images per class
MARGIN = 0.3  # points by which another candidate must be better than the product's
MARGIN_ERRORS = 2.0  # and this many standard errors, over data sets: a gain on some of them only is not a reason
TRANSFORMS: dict[str, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "sqrt": lambda x: np.sqrt(np.maximum(x, 0)),
    "signed-sqrt": lambda x: np.sign(x) * np.sqrt(np.abs(x)),
    "layer-norm": lambda x: (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5),
}
SCALINGS = ("unit", "none")  # unit: each part is scaled to length 1, and so is the whole
Figures = dict[str, dict[str, float]]  # score -> accuracy and AUC, in percent


@dataclass(frozen=True)
class Candidate:
    parts: tuple[str, ...]
    transform: str
    scaling: str

    def feature(self, raw: NDArray[np.floating], parts: Sequence[FrozenPart]) -> Floats:
        """(n, f), from the backbone's outputs side by side."""
        cuts = np.split(raw.astype(np.float64), np.cumsum([part.size for part in parts])[:-1], axis=1)
        own = [
            TRANSFORMS[self.transform](cut) for part, cut in zip(parts, cuts, strict=True) if part.name in self.parts
        ]
        if self.scaling == "none":
            return np.concatenate(own, axis=1)
        return unit(np.concatenate([unit(cut) for cut in own], axis=1))


def unit(rows: Floats) -> Floats:
    out: Floats = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return out


def candidates(parts: Sequence[FrozenPart]) -> list[Candidate]:
    """Every choice of parts with every transform and scaling."""
    names = [part.name for part in parts]
    return [
        Candidate(chosen, transform, scaling)
        for count in range(1, len(names) + 1)
        for chosen in combinations(names, count)
        for transform in TRANSFORMS
        for scaling in SCALINGS
    ]


def product_candidate(backbone: Backbone) -> Candidate:
    """What models/network/frozen_feature.py computes."""
    frozen = backbone.spec.frozen
    return Candidate(tuple(part.name for part in frozen.parts), frozen.transform, "unit")


class _PartsTrunk(nn.Module):
    """The untransformed parts as a single token: 80 KB of tokens of a transformer become 2 KB."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.trunk, self.parts = backbone.trunk, backbone.frozen.parts

    def forward(self, pixels: Tensor) -> Tensor:  # (N, 3, H, W) -> (N, 1, f)
        out: Tensor = self.parts(self.trunk(pixels))[:, None]
        return out


def stored_parts(backbone: Backbone, images: ImageSet, folder: Path) -> StoredTokens:
    return StoredTokens(replace(backbone, trunk=_PartsTrunk(backbone)), images, folder)


@dataclass(frozen=True)
class Split:
    """The parts of a stream's images."""

    learned: NDArray[np.float32]  # (n, all parts)
    labels: NDArray[np.int64]
    fresh: NDArray[np.float32]  # known and novel
    fresh_labels: NDArray[np.int64]  # a novel image has a label beyond the learned ones

    @classmethod
    def make(cls, tokens: StoredTokens, images: ImageSet, size: tuple[int, int], order: int) -> Split:
        tasks, fresh, places = training_stream(images, *size, PER_CLASS, order)
        learned = [keys for task in tasks for keys in task.values()]
        most_classes, most_images = MOST_NOVEL.get(images.name, (len(images.classes), len(fresh)))
        number = np.arange(len(places)) - np.searchsorted(places, places)  # of an image within its class
        novel = (places < len(learned) + most_classes) & (number < most_images)
        used = np.flatnonzero((places < len(learned)) | novel)
        raw = tokens.get([key for own in learned for key in own])[:, 0].numpy()
        raw_fresh = tokens.get([fresh[i] for i in used])[:, 0].numpy()
        labels = np.repeat(np.arange(len(learned)), [len(own) for own in learned])
        return cls(raw, labels, raw_fresh, places[used])


def judge(candidate: Candidate, split: Split, parts: Sequence[FrozenPart], expanded: int) -> Figures:
    """Accuracy and AUC of each closed-form score."""
    learned, fresh = (candidate.feature(raw, parts) for raw in (split.learned, split.fresh))
    p = projection(learned.shape[1], expanded)
    classes = int(split.labels.max()) + 1
    fitted = FrozenStatistics.fit(learned, np.maximum(learned @ p, 0), split.labels, classes)
    scores = fitted.scores(fresh, np.maximum(fresh @ p, 0))
    out = {}
    for name, values in (("mahalanobis", -scores.distances), ("cosine", scores.cosines), ("ridge", scores.ridge)):
        found = measure([Step(values, np.zeros(classes, np.int64), values.max(axis=1))], split.fresh_labels)
        out[name] = {"accuracy": 100 * found.accuracy[0], "auc": 100 * (found.auc[0] or 0.0)}
    return out


def value(figures: Figures) -> float:
    """What a candidate is chosen by: the mean of the scores' accuracy and AUC."""
    return float(np.mean([figure for own in figures.values() for figure in own.values()]))


def stored_figures(
    backbone: Backbone, cache: Path, data: Path, name: str, orders: int
) -> list[dict[Candidate, Figures]]:
    """The figures of all candidates for each class order; a finished order is stored in the cache and read from it."""
    images = ImageSet.load(data / f"{name}.safetensors")
    tokens = stored_parts(backbone, images, cache / "tokens")
    spec = backbone.spec.frozen
    code = source_hash([ROOT / "models" / "inference", ROOT / "models" / "network", Path(__file__)])[:12]
    found = []
    for order in range(orders):
        key = f"{name}-{order}-{images.sha256[:8]}-{backbone.spec.sha256[:8]}-{code}.json"
        file = cache / "transform" / key
        if not file.is_file():
            split = Split.make(tokens, images, ALL_SETS[name], order)
            judged = [judge(candidate, split, spec.parts, spec.expanded) for candidate in candidates(spec.parts)]
            file.parent.mkdir(parents=True, exist_ok=True)
            write_durable(file, json.dumps(judged).encode())
        found.append(dict(zip(candidates(spec.parts), json.loads(file.read_text()), strict=True)))
        print(f"{backbone.spec.name}, {name}, class order {order + 1} of {orders}", file=sys.stderr, flush=True)
    return found


def choose(found: Mapping[str, Sequence[Mapping[Candidate, Figures]]], product: Candidate) -> dict[str, Any]:
    """The chosen candidate, the one with the best mean, and all, best first; from figures by data set and class order.

    Gains are over the product's own candidate, in points, with their standard error over data sets.
    """
    rows = []
    for candidate in next(iter(found.values()))[0]:
        sets = {name: _mean([order[candidate] for order in orders]) for name, orders in found.items()}
        gains = np.array(
            [np.mean([value(o[candidate]) - value(o[product]) for o in orders]) for orders in found.values()]
        )
        mean = float(np.mean([value(own) for own in sets.values()]))
        error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else 0.0
        facts = {"mean": round(mean, 2), "gain": round(float(gains.mean()), 2), "gain_error": round(error, 2)}
        rows.append({**asdict(candidate), **facts, "sets": sets})
    rows.sort(key=lambda row: -row["mean"])
    own = next(row for row in rows if Candidate(tuple(row["parts"]), row["transform"], row["scaling"]) == product)
    clear = (row for row in rows if row["gain"] > max(MARGIN, MARGIN_ERRORS * row["gain_error"]))
    chosen = next(clear, own)
    best, chosen = ({key: row[key] for key in (*asdict(product), "gain", "gain_error")} for row in (rows[0], chosen))
    return {"chosen": chosen, "best": best, "candidates": rows}


def _mean(orders: Sequence[Figures]) -> Figures:
    return {
        score: {figure: round(float(np.mean([own[score][figure] for own in orders])), 2) for figure in figures}
        for score, figures in orders[0].items()
    }


def write(entries: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """JSON by backbone, with one line per candidate for a readable difference."""
    blocks = []
    for name, entry in entries.items():
        values = {key: json.dumps(own) for key, own in entry.items()}
        values["candidates"] = "[\n" + ",\n".join(f"   {json.dumps(row)}" for row in entry["candidates"]) + "\n  ]"
        lines = ",\n".join(f"  {json.dumps(key)}: {text}" for key, text in values.items())
        blocks.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    file.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.transform", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the image sets (safetensors)")
    parser.add_argument("--out", type=Path, default=FILE, help=f"default {FILE.name} beside this file")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the parts and finished class orders")
    parser.add_argument("--weights", type=Path, help="folder with DeiT's weights (default: weights beside --data)")
    parser.add_argument("--backbones", default=",".join(SETS), help="comma-separated; others keep their entry in --out")
    parser.add_argument("--orders", type=int, default=6, help="class orders per data set (default 6)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    configure_torch(LearnerSettings(threads=args.threads))
    weights = (args.weights or args.data.parent / "weights") / f"{DEIT}.safetensors"
    # The commit of the code that runs: a checkout may change meanwhile.
    facts = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "orders": args.orders}
    entries: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in args.backbones.split(","):
        backbone = recorded_now(args.cache, name, weights if name == DEIT else None)
        found = {data: stored_figures(backbone, args.cache, args.data, data, args.orders) for data in SETS[name]}
        entries[name] = {**facts, **choose(found, product_candidate(backbone))}
        write(entries, args.out)
        print(f"{name}: {json.dumps(entries[name]['chosen'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
