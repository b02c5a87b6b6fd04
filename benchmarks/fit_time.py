"""`python -m benchmarks.fit_time --json OUT`: seconds to fit both decisions of a version, by the number of tasks.

Random features of the offline default's sizes: the time depends on the sizes only. Tasks have 5 classes with 20 images,
of which 4 are held out; as many of them calibrate, and fit the rule, as in a version with the default settings. `rule`
is that of the networks, `refined` that of the refined feature, with the novelty decision that weighs it. A version fits
one of them, so `total` has the one that takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.machine import machine
from models.inference.evidence import Evidence, RefinedScores
from models.inference.frozen import FrozenStatistics
from trainer.learning.closed_form import fit_refined
from trainer.learning.leave_out import LeaveOut
from trainer.learning.novelty_fit import Target, fit_novelty, with_refined
from trainer.learning.prior import Prior
from trainer.learning.rule_fit import fit_rule
from trainer.learning.settings import Recipe
from trainer.learning.simulation import left_out_scores, simulated_novelty

FEATURE, EXPANDED = 1712, 1024  # EfficientNet-Lite0
CLASSES, IMAGES, HELD_OUT = 5, 20, 4


def measure(tasks: int) -> dict[str, float]:
    """Seconds of each part, for a version of this many tasks."""
    rng, recipe = np.random.default_rng(tasks), Recipe()
    classes = tasks * CLASSES
    labels = np.repeat(np.arange(classes), IMAGES)
    centres = rng.standard_normal((classes, FEATURE))
    noise = rng.standard_normal((len(labels), FEATURE)) * np.linspace(0.1, 3, FEATURE)  # not the same in all directions
    features = ((centres[labels] + noise) / 60).astype(np.float32)
    expanded = np.maximum(features @ rng.standard_normal((FEATURE, EXPANDED)), 0).astype(np.float32)
    statistics = FrozenStatistics.fit(features, expanded, labels, classes)
    chosen = np.flatnonzero(np.tile(np.arange(IMAGES) < recipe.calibration_images // classes, classes))
    kept = LeaveOut(statistics, features[chosen], expanded[chosen], labels[chosen])
    started = time.monotonic()
    left_out = left_out_scores(kept, rng)
    scored = time.monotonic()
    simulations = simulated_novelty(kept, rng)
    decision = fit_novelty(left_out, simulations, Prior(), Target())
    novelty = time.monotonic()
    fitted_on = min(HELD_OUT, (recipe.network_images or len(chosen)) // classes)
    held = np.arange(len(chosen)) % (len(chosen) // classes) < fitted_on
    count = int(held.sum())
    shape = count, CLASSES
    evidence = Evidence.of_tasks(
        [rng.standard_normal((count, CLASSES + 1)) for _ in range(tasks)],
        [np.abs(rng.standard_normal(shape)) + 1 for _ in range(tasks)],
        [rng.uniform(-1, 1, shape) for _ in range(tasks)],
        left_out.rows(held),
    )
    fit_rule(evidence, kept.columns[held], Prior())
    rule = time.monotonic()
    refined = RefinedScores(rng.uniform(-1, 1, (count, classes)), np.abs(rng.standard_normal((count, classes))) + 1)
    fit_refined(replace(evidence, refined=refined), kept.columns[held], Prior())
    with_refined(decision, left_out, held, refined, simulations, Prior(), Target(), np.ones(len(chosen)))
    with_feature = time.monotonic()
    parts = {"left_out": scored - started, "novelty": novelty - scored, "rule": rule - novelty}
    parts |= {"refined": with_feature - rule}
    parts["total"] = novelty - started + max(parts["rule"], parts["refined"])
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_time", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="report file")
    args = parser.parse_args(argv)
    threadpool_limits(os.cpu_count() or 1, user_api="blas")
    results = {str(tasks): measure(tasks) for tasks in (1, 10, 50)}
    document = {"command": "python -m benchmarks.fit_time", "machine": machine(), "seconds_by_tasks": results}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
