"""`python -m benchmarks.accuracy.refined_prior`: how the refined feature weighs beside the frozen one, in priors.json.

On the streams of `benchmarks.accuracy.prior`, so on training images only. The adapters of a version have seen images
of all of its classes: novelty cannot be simulated for them, so the weights of the novelty decision are constants.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.cells import PRIORS, commit
from benchmarks.accuracy.data import ImageSet, open_tokens, recorded_now
from benchmarks.accuracy.methods import Learning, learn, settings_of
from benchmarks.accuracy.prior import Version, fit_conditional_logit, fit_log_odds, standardised_terms, training_stream
from benchmarks.accuracy.streams import ALL_SETS, LITE0
from models.inference.evidence import Floats
from models.inference.novelty import FROZEN_SUMMARIES, REFINED_SUMMARIES, frozen_summaries, refined_summaries
from models.inference.rules import REFINED_TERMS
from trainer.learning.prior import APART, FROZEN, KNOWN, Prior
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings

PER_CLASS = (5, 20)
INPUTS = (FROZEN, *REFINED_SUMMARIES)
ONLY_FROZEN = {FROZEN: 1.0, **dict.fromkeys(REFINED_SUMMARIES, 0.0), KNOWN: 0.0}


@dataclass(frozen=True)
class Collected:
    """Evidence of fresh images under the versions of one data set's streams."""

    versions: list[Version]

    @classmethod
    def of(cls, cache: Path, data: Path, name: str, prior: Prior, seeds: int) -> Collected:
        images = ImageSet.load(data / f"{name}.safetensors")
        tokens = open_tokens(recorded_now(cache, LITE0), images, cache / "tokens")
        found: list[Version] = []
        for per_class, seed in product(PER_CLASS, range(seeds)):
            tasks, fresh, labels = training_stream(images, *ALL_SETS[name], per_class, seed)
            settings = settings_of("ours", seed, prior.model_copy(update={"refined_novelty": ONLY_FROZEN}))
            recipe = settings.recipe.model_copy(update={"networks": "always"})

            def on_learned(learning: Learning, labels: NDArray[np.int64] = labels) -> None:
                if (version := _version(learning, labels)) is not None:
                    found.append(version)

            learn(tokens, tasks, fresh, settings.model_copy(update={"recipe": recipe}), on_learned)
            print(f"{name}, {per_class} images per class, stream {seed + 1} of {seeds}", file=sys.stderr, flush=True)
        return cls(found)


def _version(learning: Learning, labels: NDArray[np.int64]) -> Version | None:
    model, evidence = learning.learned.model, learning.evidence
    if evidence.refined is None:
        return None
    known, novelty, frozen = labels < len(model.classes), model.novelty, len(FROZEN_SUMMARIES)
    terms = standardised_terms(evidence, REFINED_TERMS, known)
    if not novelty.centre[frozen:-1].any():  # too few held-out images to standardise the refined summaries
        return Version(terms, labels[known], np.zeros((0, len(INPUTS))), np.zeros(0, bool))
    summaries = np.concatenate([frozen_summaries(evidence.frozen), refined_summaries(evidence.refined)], axis=1)
    rows = (summaries - novelty.centre[:-1]) / novelty.scale[:-1]
    inputs: Floats = np.column_stack([rows[:, :frozen] @ novelty.weights[:frozen], rows[:, frozen:]])
    return Version(terms, labels[known], inputs, known)


def refined_priors(found: Mapping[str, Collected]) -> dict[str, Any]:
    """By name as in priors.json: `all`, and `without <data set>` for each."""
    left_out = {"all": ""} | {f"without {name}": name for name in found if len(found) > 1}
    out = {}
    for name, without in left_out.items():
        used = [version for data, own in found.items() if data != without for version in own.versions]
        novelty = fit_log_odds(used, INPUTS)
        out[name] = {
            "refined_rule": fit_conditional_logit(used, REFINED_TERMS),
            "refined_novelty": novelty | {APART: mean_distance(used, novelty)},
        }
    return out


def mean_distance(found: Sequence[Version], novelty: Mapping[str, float]) -> float:
    """Of novel images from the line that the refined scores of known ones follow over their frozen scores."""
    weights = [novelty[name] for name in REFINED_SUMMARIES]
    distances = []
    for version in found:
        known = version.known
        if known.sum() > 1 and not known.all():
            frozen, refined = version.summaries[:, 0], version.summaries[:, 1:] @ weights
            slope, intercept = np.polyfit(frozen[known], refined[known], 1)
            distances.append(float((refined - slope * frozen - intercept)[~known].mean()))
    return round(float(np.mean(distances)), 3) if distances else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.refined_prior", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the image sets (safetensors)")
    parser.add_argument("--out", type=Path, default=PRIORS, help=f"default {PRIORS.name} beside this file: extended")
    parser.add_argument("--cache", type=Path, required=True, help="folder for tokens")
    parser.add_argument("--seeds", type=int, default=1, help="streams per data set and images per class (default 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    configure_torch(LearnerSettings(threads=args.threads))
    document = json.loads(args.out.read_text())
    facts = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "seeds": args.seeds}
    given = {name: Prior.model_validate(document["priors"][f"without {name}"]) for name in ALL_SETS}
    found = {name: Collected.of(args.cache, args.data, name, given[name], args.seeds) for name in ALL_SETS}
    for name, entry in refined_priors(found).items():
        document["priors"][name] |= entry
    document["facts"]["refined"] = {**facts, "per_class": PER_CLASS}
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(args.out.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
