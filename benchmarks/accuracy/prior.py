"""`python -m benchmarks.accuracy.prior`: the prior of both decisions, from training images of several data sets.

A stream learns from a part of a class's training images. The others are fresh known images, and images of classes that
are not learned yet are novel. No test image is looked at. Each data set is judged with the prior of the other ones; the
product has that of all (trainer/learning/prior.py).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.accuracy.cells import PRIORS, commit, source_hash
from benchmarks.accuracy.data import ImageSet, open_tokens, recorded_now
from benchmarks.accuracy.methods import Learning, learn, settings_of
from benchmarks.accuracy.streams import ALL_SETS, LITE0
from models.files import write_durable
from models.inference.evidence import Evidence, Floats
from models.inference.novelty import FROZEN_SUMMARIES, frozen_summaries
from models.inference.rules import TERMS, term
from trainer.learning.prior import KNOWN, Prior
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

PER_CLASS = (5, 20)
FRESH = 10  # images per class to judge with, at most
LEAST_FRESH = 4  # a class with few images is learned from fewer
STEP_WEIGHT = 100.0  # every version counts equally: as this many images
PENALTY = 0.1  # of a weak quadratic penalty, for weights that the data do not determine


@dataclass(frozen=True)
class Version:
    """Standardised evidence of fresh images under one version."""

    terms: NDArray[np.float32]  # (known images, C, terms)
    columns: NDArray[np.int64]  # (known images,), their classes
    summaries: Floats  # (n, summaries)
    known: NDArray[np.bool_]  # (n,)


def training_stream(
    images: ImageSet, tasks: int, classes: int, per_class: int, seed: int
) -> tuple[list[dict[str, list[str]]], list[str], NDArray[np.int64]]:
    """(tasks, keys of fresh images, their classes in learning order), all of them training images."""
    rng = np.random.default_rng([seed, per_class])
    batches: list[dict[str, list[str]]] = []
    fresh: list[str] = []
    labels: list[int] = []
    for place, c in enumerate(rng.permutation(len(images.classes))):
        own = images.pick("train", int(c), None, rng)
        # Neighbours are often taken of the same object: learn from one end, judge with the other.
        own = own if rng.random() < 0.5 else own[::-1]
        count = min(per_class, max(2, len(own) - LEAST_FRESH))
        if place < tasks * classes:
            if place % classes == 0:
                batches.append({})
            batches[-1][f"{place:04d}"] = own[:count]  # the name keeps the place when classes are sorted
        rest = own[count:][-FRESH:]
        fresh += rest
        labels += [place] * len(rest)
    return batches, fresh, np.array(labels, np.int64)


def versions(tokens: TokenCache, images: ImageSet, size: tuple[int, int], per_class: int, seed: int) -> list[Version]:
    """The evidence of fresh images under every version of one stream."""
    tasks, fresh, labels = training_stream(images, *size, per_class, seed)
    found: list[Version] = []

    def on_learned(learning: Learning) -> None:
        model, evidence = learning.learned.model, learning.evidence
        known = labels < len(model.classes)
        rows, size = frozen_summaries(evidence.frozen), len(FROZEN_SUMMARIES)
        rows = (rows - model.novelty.centre[:size]) / model.novelty.scale[:size]
        found.append(Version(standardised_terms(evidence, TERMS, known), labels[known], rows, known))

    settings = settings_of("ours", seed, Prior())
    # The weights of the networks' evidence are wanted, whether or not a version of this stream would use it.
    # Versions with a refined feature run no network.
    recipe = settings.recipe.model_copy(update={"networks": "always", "refine": False})
    learn(tokens, tasks, fresh, settings.model_copy(update={"recipe": recipe}), on_learned)
    return found


def standardised_terms(evidence: Evidence, names: Sequence[str], known: NDArray[np.bool_]) -> NDArray[np.float32]:
    """As in `fit_rule`: with a deviation of 1 over the classes of an image. (known images, C, terms)"""
    terms = np.stack([term(evidence, name) for name in names], axis=2)[known]
    deviation = terms.std(axis=1).mean(axis=0)
    return (terms / np.where(deviation > 1e-9, deviation, 1.0)).astype(np.float32)


def fit_rule_prior(found: Sequence[Version]) -> dict[str, float]:
    return fit_conditional_logit(found, TERMS)


def fit_conditional_logit(found: Sequence[Version], names: Sequence[str]) -> dict[str, float]:
    """The weights of the terms, none negative, with the least cross-entropy over all versions."""
    used = [version for version in found if version.terms.shape[1] > 1 and len(version.columns)]

    def loss(weights: Floats) -> tuple[float, Floats]:
        value, gradient = PENALTY / 2 * float((weights**2).sum()), PENALTY * weights
        for version in used:
            scores = version.terms @ weights  # (n, C)
            scores = scores - scores.max(axis=1, keepdims=True)
            total = np.exp(scores).sum(axis=1, keepdims=True)
            rows, factor = np.arange(len(version.columns)), STEP_WEIGHT / len(version.columns)
            value -= factor * float((scores[rows, version.columns] - np.log(total[:, 0])).sum())
            expected = np.einsum("nc,nct->t", np.exp(scores) / total, version.terms)
            gradient = gradient - factor * (version.terms[rows, version.columns].sum(axis=0) - expected)
        return value, gradient

    start = np.ones(len(names))
    weights = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(0, None)] * len(start)).x
    return dict(zip(names, np.round(weights, 3).tolist(), strict=True))


def fit_novelty_prior(found: Sequence[Version]) -> dict[str, float]:
    return fit_log_odds(found, FROZEN_SUMMARIES)


def fit_log_odds(found: Sequence[Version], names: Sequence[str]) -> dict[str, float]:
    """Logistic regression of being known; known and novel images of a version count equally, no weight is negative."""
    used = [version for version in found if version.known.any() and not version.known.all()]
    design = np.concatenate([np.column_stack([v.summaries, np.ones(len(v.summaries))]) for v in used])
    sign = np.concatenate([np.where(v.known, 1.0, -1.0) for v in used])
    share = np.concatenate([np.where(v.known, 0.5 / v.known.sum(), 0.5 / (~v.known).sum()) for v in used]) * STEP_WEIGHT

    def loss(weights: Floats) -> tuple[float, Floats]:
        margin = sign * (design @ weights)
        value = float((share * np.logaddexp(0, -margin)).sum()) + PENALTY / 2 * float((weights**2).sum())
        slope = -sign * share / (1 + np.exp(np.clip(margin, -500, 500)))
        return value, design.T @ slope + PENALTY * weights

    size = design.shape[1]
    bounds = [(0, None)] * (size - 1) + [(None, None)]
    weights = minimize(loss, np.zeros(size), jac=True, method="L-BFGS-B", bounds=bounds).x
    return dict(zip((*names, KNOWN), np.round(weights, 3).tolist(), strict=True))


def priors(found: Mapping[str, Sequence[Version]]) -> dict[str, Any]:
    """By name: `all`, and `without <data set>` for each."""
    left_out = {"all": ""} | {f"without {name}": name for name in found if len(found) > 1}
    out = {}
    for name, without in left_out.items():
        used = [version for data, own in found.items() if data != without for version in own]
        out[name] = {"rule": fit_rule_prior(used), "novelty": fit_novelty_prior(used)}
    return out


def stored_versions(cache: Path, name: str, data: Path, size: tuple[int, int], seeds: int) -> list[Version]:
    """All versions of a data set's streams; each finished stream is stored in the cache and read from it."""
    images = ImageSet.load(data / f"{name}.safetensors")
    backbone = recorded_now(cache, LITE0)
    tokens = open_tokens(backbone, images, cache / "tokens")
    root = Path(__file__).resolve().parents[2]
    code = source_hash([root / "models", root / "trainer", Path(__file__)])[:12]
    found: list[Version] = []
    for per_class in PER_CLASS:
        for seed in range(seeds):
            file = cache / "prior" / f"{name}-{per_class}-{seed}-{images.sha256[:8]}-{code}.npz"
            if not file.is_file():
                own = versions(tokens, images, size, per_class, seed)
                arrays = {f"{k}/{key}": value for k, version in enumerate(own) for key, value in vars(version).items()}
                buffer = io.BytesIO()
                np.savez_compressed(buffer, **arrays)
                file.parent.mkdir(parents=True, exist_ok=True)
                write_durable(file, buffer.getvalue())
            with np.load(file) as stored:
                count = len(stored.files) // 4
                found += [
                    Version(*(stored[f"{k}/{key}"] for key in ("terms", "columns", "summaries", "known")))
                    for k in range(count)
                ]
            print(f"{name}, {per_class} images per class, stream {seed + 1} of {seeds}", file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.prior", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the image sets (safetensors)")
    parser.add_argument("--out", type=Path, default=PRIORS, help=f"default {PRIORS.name} beside this file")
    parser.add_argument("--cache", type=Path, required=True, help="folder for tokens and finished streams")
    parser.add_argument("--sets", default=",".join(ALL_SETS), help="data sets, comma-separated (default: all four)")
    parser.add_argument("--seeds", type=int, default=3, help="streams per data set and images per class (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    configure_torch(LearnerSettings(threads=args.threads))
    names = args.sets.split(",")
    # Before the streams are learned, which takes long: the commit of the code that learns them.
    facts = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "seeds": args.seeds, "sets": names}
    found = {name: stored_versions(args.cache, name, args.data, ALL_SETS[name], args.seeds) for name in names}
    document = {"facts": {**facts, "per_class": PER_CLASS}, "priors": priors(found)}
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(args.out.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
