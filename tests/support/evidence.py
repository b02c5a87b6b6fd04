"""Random evidence for rules, answers and calibration."""

from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from models.inference.evidence import Evidence, Floats, FrozenScores

quick = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)
class_counts = st.lists(st.integers(1, 4), min_size=1, max_size=4)  # classes per task


def random_evidence(seed: int, counts: list[int], n: int = 6) -> Evidence:
    rng = np.random.default_rng(seed)
    total = sum(counts)
    return Evidence.of_tasks(
        logits=[rng.normal(0, 3, (n, c + 1)) for c in counts],
        distances=[rng.uniform(0.5, 30, (n, c)) for c in counts],
        cosines=[rng.uniform(-1, 1, (n, c)) for c in counts],
        frozen=FrozenScores(
            rng.uniform(0.5, 10, (n, total)),
            rng.uniform(-1, 1, (n, total)),
            rng.normal(0, 0.3, (n, total)),
            rng.uniform(0.5, 10, (n, total)),
            rng.uniform(0.5, 10, (n, total)),
            rng.uniform(-1, 1, (n, total)),
        ),
    )


def frozen_evidence(distances: ArrayLike, counts: Sequence[int] | None = None) -> Evidence:
    """Evidence of frozen distances (n, C) alone: all networks, cosines and ridge scores are undecided."""
    given = np.array(distances, float)
    n, total = given.shape
    tasks = [total] if counts is None else counts
    return Evidence.of_tasks(
        logits=[np.zeros((n, c + 1)) for c in tasks],
        distances=[np.ones((n, c)) for c in tasks],
        cosines=[np.zeros((n, c)) for c in tasks],
        frozen=FrozenScores(given, np.zeros((n, total)), np.zeros((n, total)), given, given, np.zeros((n, total))),
    )


def with_parts(evidence: Evidence, **parts: Sequence[Floats]) -> Evidence:
    """The evidence with other `logits`, `distances` or `cosines` per task."""
    own = {"logits": evidence.logits, "distances": evidence.distances, "cosines": evidence.cosines}
    return Evidence.of_tasks(**{**own, **parts}, frozen=evidence.frozen)
