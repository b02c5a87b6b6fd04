"""`python -m benchmarks.accuracy.oracle`: what the networks and the refined feature know beside the frozen evidence.

Weights of both decisions are fitted on the answers of one half of the test images and judged on the other half, in
turn. No service can do that: the figures are optimistic estimates of what each kind of evidence adds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.cells import commit, prior_for
from benchmarks.accuracy.data import ImageSet, open_tokens, recorded_now
from benchmarks.accuracy.methods import Learning, learn, settings_of
from benchmarks.accuracy.prior import Version, fit_conditional_logit, fit_log_odds, standardised_terms
from benchmarks.accuracy.streams import ALL_SETS, LITE0, Stream
from benchmarks.machine import machine
from models.inference.evidence import Evidence, Floats, log_probabilities
from models.inference.novelty import FROZEN_SUMMARIES, REFINED_SUMMARIES, frozen_summaries, refined_summaries
from models.inference.rules import FROZEN_TERMS, REFINED, REFINED_TERMS, TERMS, Rule
from trainer.learning.gate import auc
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings

PER_CLASS = 20
NETWORK_SUMMARIES = ("network_probability", "network_distance", "network_cosine")
INPUTS = (*FROZEN_SUMMARIES, *NETWORK_SUMMARIES, *REFINED_SUMMARIES)
TASK_TERMS = tuple(name for name in TERMS if name not in FROZEN_TERMS)
# By name: terms of the class decision, and inputs of the novelty decision.
KINDS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "frozen": (FROZEN_TERMS, FROZEN_SUMMARIES),
    "with networks": ((*FROZEN_TERMS, *TASK_TERMS), (*FROZEN_SUMMARIES, *NETWORK_SUMMARIES)),
    "with the refined feature": (REFINED_TERMS, (*FROZEN_SUMMARIES, *REFINED_SUMMARIES)),
    "with both": ((*FROZEN_TERMS, *TASK_TERMS, REFINED), INPUTS),
}


def last_evidence(name: str, data: Path, cache: Path, seed: int) -> tuple[Evidence, NDArray[np.int64]]:
    """The evidence of test images after the last task of a stream, and their classes; -1 is unknown."""
    images = ImageSet.load(data / f"{name}.safetensors")
    tokens = open_tokens(recorded_now(cache, LITE0), images, cache / "tokens")
    stream = Stream.make(images, *ALL_SETS[name], PER_CLASS, seed)
    settings = settings_of("ours", seed, prior_for(name)[0])
    recipe = settings.recipe.model_copy(update={"networks": "always"})
    found: list[Evidence] = []

    def on_learned(learning: Learning) -> None:
        # The paper's rule runs the networks, which a version with a refined feature does not.
        found[:] = [replace(learning.learned.model, rule=Rule()).evidence(learning.test)]

    learn(tokens, stream.tasks, stream.test_keys, settings.model_copy(update={"recipe": recipe}), on_learned)
    return found[0], stream.labels


def figures(evidence: Evidence, labels: NDArray[np.int64], seed: int) -> dict[str, dict[str, float]]:
    """Accuracy and AUC in per cent, by kind of evidence."""
    half = np.random.default_rng(seed).permutation(np.arange(len(labels)) % 2)
    inputs = _inputs(evidence)
    return {
        kind: {"accuracy": _accuracy(evidence, labels, half, terms), "auc": _auc(inputs, labels, half, names)}
        for kind, (terms, names) in KINDS.items()
    }


def _accuracy(evidence: Evidence, labels: NDArray[np.int64], half: NDArray[np.int64], names: Sequence[str]) -> float:
    known = labels >= 0
    terms, columns, part = standardised_terms(evidence, names, known), labels[known], half[known]
    right = []
    for k in (0, 1):
        own = part == k
        version = Version(terms[~own], columns[~own], np.zeros((0, 0)), np.zeros(0, bool))
        weights = fit_conditional_logit([version], names)
        scores = terms[own] @ np.array([weights[name] for name in names])
        right.append(scores.argmax(axis=1) == columns[own])
    return round(100 * float(np.concatenate(right).mean()), 2)


def _auc(
    inputs: Mapping[str, Floats], labels: NDArray[np.int64], half: NDArray[np.int64], names: Sequence[str]
) -> float:
    known, rows = labels >= 0, np.column_stack([inputs[name] for name in names])
    rows = (rows - rows[known].mean(axis=0)) / np.maximum(rows[known].std(axis=0), 1e-12)
    found = []
    for k in (0, 1):
        own = half == k
        nothing = np.zeros((0, 1, 1), np.float32)
        version = Version(nothing, np.zeros(0, np.int64), rows[~own], known[~own])
        weights = fit_log_odds([version], names)
        scores = rows[own] @ np.array([weights[name] for name in names])
        found.append(auc(scores[known[own]], scores[~known[own]]))
    return round(100 * float(np.mean([value for value in found if value is not None])), 2)


def _inputs(evidence: Evidence) -> dict[str, Floats]:
    if evidence.refined is None:
        raise RuntimeError("the version has no refined feature")
    networks = np.column_stack(
        [
            log_probabilities(evidence).max(axis=1),
            -evidence.class_distances.min(axis=1),
            evidence.class_cosines.max(axis=1),
        ]
    )
    every = np.concatenate([frozen_summaries(evidence.frozen), networks, refined_summaries(evidence.refined)], axis=1)
    return dict(zip(INPUTS, every.T, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.oracle", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the image sets (safetensors)")
    parser.add_argument("--cache", type=Path, required=True, help="folder for tokens")
    parser.add_argument("--json", type=Path, required=True, help="the report")
    parser.add_argument("--orders", type=int, default=1, help="class orders per data set (default 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    configure_torch(LearnerSettings(threads=args.threads))
    facts = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "machine": machine()}
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    for name in ALL_SETS:
        for seed in range(args.orders):
            own = figures(*last_evidence(name, args.data, args.cache, seed), seed)
            found.setdefault(name, []).append(own)
            print(name, seed, json.dumps(own), file=sys.stderr, flush=True)
    mean = {
        kind: {
            figure: round(float(np.mean([own[kind][figure] for orders in found.values() for own in orders])), 2)
            for figure in ("accuracy", "auc")
        }
        for kind in KINDS
    }
    report = {"about": __doc__, **facts, "per_class": PER_CLASS, "orders": args.orders, "mean": mean, "sets": found}
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(mean, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
