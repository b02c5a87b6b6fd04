"""How well the inbox groups novelties: the clicks that labelling takes, by the scale and by the least cosine.

    python -m benchmarks.grouping --images FOLDER --work FOLDER

Training images of image sets (`<name>.safetensors`, see benchmarks/accuracy/data.py). Some classes are known, and give
the scale; images of other classes arrive in random order. A person clicks twice per group, to select and to name it,
and once per image that is not of its group's commonest class.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.data import ImageSet, open_tokens
from models.inference.frozen import FrozenStatistics
from models.network.backbone import open_backbone
from service.inbox.index import SimilarityGroups
from service.inbox.similarity import EmbeddingScale, unit_vector
from service.inference.embedding_scale import scale_of
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

NAMES = ("grocery_store", "caltech", "tiny_imagenet")
KNOWN_CLASSES, KNOWN_IMAGES = 10, 20
STREAMS = ((1, 30), (3, 20), (10, 30), (25, 15))  # classes that are novel together, images per class
PLAIN, SCALED = (0.45, 0.5, 0.55, 0.6), (0.15, 0.2, 0.25, 0.3, 0.35)
Labels = NDArray[np.int64]
Rows = NDArray[np.float32]


def group(embeddings: Rows, scale: EmbeddingScale) -> list[list[int]]:
    """The rows of each group."""
    groups = SimilarityGroups(len(embeddings), scale)
    for row, embedding in enumerate(embeddings):
        groups.add(str(row), 0, unit_vector(embedding))
    names = dict.fromkeys(groups.group_of(str(row)) for row in range(len(embeddings)))
    return [[int(row) for row in groups.members(name)] for name in names]


def clicks(groups: Sequence[Sequence[int]], labels: Labels) -> tuple[float, float, float]:
    """(groups, share of images that are of their group's commonest class, clicks)"""
    common = sum(Counter(labels[list(rows)].tolist()).most_common(1)[0][1] for rows in groups)
    return len(groups), common / len(labels), 2 * len(groups) + len(labels) - common


def run(images: ImageSet, tokens: TokenCache, orders: int) -> dict[tuple[str, float], list[list[float]]]:
    """Means over class orders of what `clicks` returns, one row per stream, by scale and least cosine."""
    found: dict[tuple[str, float], list[list[tuple[float, float, float]]]] = {}
    for stream, (classes, each) in enumerate(STREAMS):
        for order in range(orders):
            rng = np.random.default_rng(order)
            chosen = rng.permutation(len(images.classes))[: KNOWN_CLASSES + classes].tolist()
            known, labels = _rows(images, chosen[:KNOWN_CLASSES], KNOWN_IMAGES, rng)
            x, expanded = tokens.frozen(known)
            scale = scale_of(FrozenStatistics.fit(x, expanded, labels, KNOWN_CLASSES))
            novel, labels = _rows(images, chosen[KNOWN_CLASSES:], each, rng)
            shuffled = rng.permutation(len(novel))
            embeddings, labels = tokens.frozen(novel)[0][shuffled], labels[shuffled]
            plain = np.zeros_like(scale.centre), np.ones_like(scale.weights)
            scales = {("plain", least): EmbeddingScale(*plain, least) for least in PLAIN}
            scales |= {("scaled", least): EmbeddingScale(scale.centre, scale.weights, least) for least in SCALED}
            for name, one in scales.items():
                rows = found.setdefault(name, [[] for _ in STREAMS])
                rows[stream].append(clicks(group(embeddings, one), labels))
    return {name: [np.mean(row, axis=0).tolist() for row in rows] for name, rows in found.items()}


def _rows(images: ImageSet, classes: Sequence[int], each: int, rng: np.random.Generator) -> tuple[list[str], Labels]:
    """(keys of training images, their positions in `classes`)"""
    keys = [images.pick("train", label, each, rng) for label in classes]
    counts = [len(own) for own in keys]
    return [key for own in keys for key in own], np.repeat(np.arange(len(classes)), counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, metavar="FOLDER", help="with the image sets")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="for the backbone and stored tokens")
    parser.add_argument("--orders", type=int, default=5, help="class orders per stream (default: 5)")
    given = parser.parse_args()
    settings = LearnerSettings()
    backbone = open_backbone(given.work, settings.backbone, settings.backbone_weights, settings.adapted_blocks)
    heads = [f"{classes} x {each}" for classes, each in STREAMS]
    for name in NAMES:
        images = ImageSet.load(given.images / f"{name}.safetensors")
        print(f"\n{name}: groups, purity, clicks of classes x images\n\n| | {' | '.join(heads)} |")
        print("| --- |" + " --- |" * len(heads))
        for (scale, least), rows in run(images, open_tokens(backbone, images, given.work), given.orders).items():
            cells = [f"{groups:.0f}, {100 * pure:.0f} %, {number:.0f}" for groups, pure, number in rows]
            print(f"| {scale} {least:.2f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
