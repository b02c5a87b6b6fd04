"""`python -m benchmarks.accuracy.cascade`: what the cascade of a transformer costs in accuracy and AUC.

One training, as the networks do not depend on the cascade. After each task, both decisions are fitted again for each
number of networks that may run per image, and with all of them, on the same left-out images.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.cells import commit, prior_for
from benchmarks.accuracy.data import ImageSet
from benchmarks.accuracy.methods import Learning, answered, learn, settings_of
from benchmarks.accuracy.metrics import Step, measure
from benchmarks.accuracy.streams import DEIT, Stream
from benchmarks.machine import machine
from models.inference.model import Model
from models.network.adapted_blocks import TaskTensors
from models.network.backbone import open_backbone
from trainer.learning.evaluation import evaluate
from trainer.learning.learner import Learner
from trainer.learning.memory import Samples
from trainer.learning.reproducibility import configure_torch, random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

BAR = 0.5  # points that a cascade may lose
Networks = Literal["if they pay", "always"]


class RememberedFeatures(TokenCache):
    """Features under finished networks, computed once for all variants."""

    _known: dict[tuple[str, str, int], NDArray[np.float32]] | None = None

    def features(
        self, keys: Sequence[str], task: TaskTensors, *, view: int = 0, store: bool = True
    ) -> NDArray[np.float32]:
        known = self._known = {} if self._known is None else self._known
        network = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in task)).hexdigest()
        missing = [key for key in dict.fromkeys(keys) if (key, network, view) not in known]
        rows = super().features(missing, task, view=view)
        known.update({(key, network, view): row for key, row in zip(missing, rows, strict=True)})
        size = self.backbone.spec.dimensions
        return np.array([known[key, network, view] for key in keys], np.float32).reshape(len(keys), size)


@dataclass(frozen=True)
class Variant:
    """How many networks may run per image, None for all, and whether their evidence counts where it does not pay."""

    most: int | None
    networks: Networks

    @property
    def name(self) -> str:
        return ("exact" if self.most is None else f"cascade {self.most}") + f", networks {self.networks}"

    def settings(self, settings: LearnerSettings) -> LearnerSettings:
        recipe = settings.recipe.model_copy(update={"networks": self.networks})
        return settings.model_copy(update={"cascade": self.most or "off", "recipe": recipe})


Steps = dict[str, list[Step]]  # by variant
Ran = dict[str, list[float]]  # by variant: the mean number of networks that ran per test image after each task


def run(
    tokens: TokenCache,
    stream: Stream,
    settings: LearnerSettings,
    variants: Sequence[Variant],
    on_task: Callable[[Steps, Ran], None],
) -> None:
    """Learn the stream; `on_task` gets the results of all tasks so far."""
    steps: Steps = {variant.name: [] for variant in variants}
    ran: Ran = {variant.name: [] for variant in variants}
    parents = [(Learner(tokens, settings).empty(), Samples())]
    started = time.monotonic()

    def on_learned(learning: Learning) -> None:
        learned = learning.learned
        for variant in variants:
            own, rng = variant.settings(settings), random_stream(settings.seed, "cascade", len(parents))
            model, verdict = evaluate(tokens, *parents[-1], learned.model, learned.samples, own, rng)
            evidence = model.evidence(learning.test)
            steps[variant.name].append(answered(model, evidence, verdict.accuracy, verdict.novelty_auc))
            ran[variant.name].append(_networks_per_image(model, evidence.ran))
        parents.append((learned.model, learned.samples))
        print(f"task {len(parents) - 1}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        on_task(steps, ran)

    learn(tokens, stream.tasks, stream.test_keys, settings, on_learned)


def _networks_per_image(model: Model, ran: NDArray[np.bool_] | None) -> float:
    if not model.rule.uses_networks:
        return 0.0
    return float(len(model.tasks)) if ran is None else float(ran.sum(axis=1).mean())


def summary(steps: Steps, ran: Ran, stream: Stream) -> dict[str, Any]:
    """Per variant: its figures in percent, and how far a cascade is below the exact rule."""
    results = {name: measure(own, stream.labels) for name, own in steps.items()}
    out: dict[str, Any] = {}
    for name, result in results.items():
        exact = results["exact," + name.partition(",")[2]]
        gaps = {
            figure: 100 * (float(exact.figures()[figure] or 0) - float(result.figures()[figure] or 0))
            for figure in ("last", "aia", "ai_auc")
        }
        out[name] = {
            **{figure: round(100 * float(result.figures()[figure] or 0), 2) for figure in gaps},
            "below_exact": {figure: round(gap, 2) for figure, gap in gaps.items()},
            "networks_per_image": [round(value, 2) for value in ran[name]],
            "met": max(gaps["last"], gaps["aia"], gaps["ai_auc"]) <= BAR,
            "accuracy": [round(100 * value, 2) for value in result.accuracy],
        }
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.cascade", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with tiny_imagenet.safetensors")
    parser.add_argument("--weights", type=Path, help="folder with DeiT's weights (default: weights beside --data)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the report")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the recorded backbone")
    parser.add_argument("--blocks", type=int, default=2, help="adapted blocks (default 2)")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--networks", default="2,4", help="networks per image, comma-separated (default 2,4)")
    parser.add_argument("--order", type=int, default=0, help="class order (default 0)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    prior = prior_for("tiny_imagenet")[0]
    settings = settings_of("ours", args.order, prior, threads=args.threads, adapted_blocks=args.blocks)
    configure_torch(settings)
    weights = (args.weights or args.data.parent / "weights") / f"{DEIT}.safetensors"
    backbone = open_backbone(args.cache / f"{DEIT}-{args.blocks}", DEIT, weights, args.blocks)
    images = ImageSet.load(args.data / "tiny_imagenet.safetensors")
    stream = Stream.make(images, args.tasks, 5, 20, args.order)
    limits = [None, *map(int, args.networks.split(","))]
    variants = [Variant(most, networks) for networks in ("if they pay", "always") for most in limits]
    started = time.monotonic()
    about = f"DeiT-Ti, {args.blocks} adapted blocks, Tiny-ImageNet, tasks of 5 classes with 20 images each"
    facts = {"about": about, "commit": commit(), "machine": machine(), "order": args.order}

    def write(steps: Steps, ran: Ran) -> None:
        """After every task: a run takes an hour or more."""
        document = {
            **facts,
            "tasks": len(next(iter(steps.values()))),
            "seconds": round(time.monotonic() - started),
            "test_images": len(stream.test_keys),
            "variants": summary(steps, ran, stream),
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n")

    run(RememberedFeatures(backbone, images.read), stream, settings, variants, write)
    print(args.out.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
