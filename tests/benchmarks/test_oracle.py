"""The oracle's figures: weights that are fitted on the answers of one half of the images and judged on the other."""

from dataclasses import replace

import numpy as np

from benchmarks.accuracy.oracle import KINDS, figures
from models.inference.evidence import RefinedScores
from tests.support.evidence import random_evidence


def test_evidence_that_knows_the_answers_raises_both_figures_and_noise_does_not() -> None:
    rng = np.random.default_rng(0)
    n, counts = 600, [3, 3]
    labels = rng.integers(-1, 6, n)
    cosines, distances = rng.uniform(-1, 1, (n, 6)), rng.uniform(4, 10, (n, 6))
    known = np.flatnonzero(labels >= 0)
    cosines[known, labels[known]] += 1.5
    distances[known, labels[known]] -= 3
    evidence = replace(random_evidence(0, counts, n), refined=RefinedScores(cosines, distances))
    found = figures(evidence, labels, seed=0)
    assert found.keys() == KINDS.keys()
    for figure, chance in (("accuracy", 100 / 6), ("auc", 50)):
        assert abs(found["frozen"][figure] - chance) < 8
        assert abs(found["with networks"][figure] - chance) < 8
        assert found["with the refined feature"][figure] > 85
        assert found["with both"][figure] > 85
