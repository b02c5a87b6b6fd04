"""Random evidence for rules, answers and calibration."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from models.inference.evidence import Evidence

quick = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)
class_counts = st.lists(st.integers(1, 4), min_size=1, max_size=4)  # classes per task


def random_evidence(seed: int, counts: list[int], n: int = 6) -> Evidence:
    rng = np.random.default_rng(seed)
    return Evidence(
        logits=[rng.normal(0, 3, (n, c + 1)) for c in counts],
        distances=[rng.uniform(0.5, 30, (n, c)) for c in counts],
        frozen=rng.uniform(0.5, 10, (n, sum(counts))),
    )
