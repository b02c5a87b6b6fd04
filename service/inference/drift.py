"""Drift of the incoming images: the population stability index (PSI) of their calibrated scores.

A calibrated score is a quantile among left-out images of known classes, so images like those have uniform scores in
every version: the reference is the uniform distribution. All answers count, novel ones too.

By convention an index below 0.1 means no change and above 0.25 a large change. Without drift the index of n scores
against m reference scores is distributed about as chi-square(BINS - 1) * (1/m + 1/n); with 20 held-out images it is
nearly always above 0.25. The alert therefore requires more than 0.25 *and* more than the 99th percentile of that
distribution (deploy/prometheus/rules).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

BINS = 10
WINDOW_SECONDS = 3600.0
SMOOTHING = 0.5  # added to every bin, so that an empty bin does not make the index infinite


def stability_index(counts: Sequence[int]) -> float:
    """PSI of the counts per bin against uniform: the sum of (p - q) ln(p / q), which is 0 for equal counts."""
    expected = 1 / len(counts)
    total = sum(counts) + SMOOTHING * len(counts)
    shares = [(count + SMOOTHING) / total for count in counts]
    return math.fsum((share - expected) * math.log(share / expected) for share in shares)


class ScoreDrift:
    """The index of the last `window` scores of one version, of the last hour. Thread-safe."""

    def __init__(self, window: int = 2000, minimum: int = 200, clock: Callable[[], float] = time.monotonic) -> None:
        self._window, self._minimum, self._clock = window, minimum, clock
        self._lock = Lock()
        self._scores: deque[tuple[float, int]] = deque()  # (time, bin)
        self._counts = [0] * BINS

    def observe(self, score: float) -> None:
        """Add the calibrated score of one image."""
        if not 0 <= score <= 1:  # also NaN; a metric must not make an answer fail
            return
        bin = min(int(score * BINS), BINS - 1)
        with self._lock:
            self._scores.append((self._clock(), bin))
            self._counts[bin] += 1
            self._drop_old()

    def reset(self) -> None:
        """Drop all scores. Call it when another version becomes active: its scores have another reference."""
        with self._lock:
            self._scores.clear()
            self._counts = [0] * BINS

    @property
    def samples(self) -> int:
        """Scores in the window."""
        with self._lock:
            self._drop_old()
            return len(self._scores)

    @property
    def index(self) -> float | None:
        """PSI of the window; None below `minimum` scores."""
        with self._lock:
            self._drop_old()
            return stability_index(self._counts) if len(self._scores) >= self._minimum else None

    def _drop_old(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        while self._scores and (len(self._scores) > self._window or self._scores[0][0] < oldest):
            _, bin = self._scores.popleft()
            self._counts[bin] -= 1
