"""Are today's images like those that the model was calibrated on? The population stability index (PSI) of their scores.

A calibrated score is a quantile among held-out images of known classes, so images like those spread evenly over 0..1:
the reference is uniform, whatever the version. All answers count, novel ones too: what the robots see is what drifts.

By custom below 0.1 is no change and above 0.25 a large one. Chance has its share, though: without any drift the index
of n scores against a reference of m is about chi-square(BINS - 1) * (1/m + 1/n), and with twenty held-out images it is
above 0.25 nearly always. The alert therefore asks for more than 0.25 *and* more than chance gives, by the 99th
percentile of that distribution (deploy/prometheus/rules).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

BINS = 10
WINDOW_SECONDS = 3600.0
# Half a score more in every bin: an empty one makes the index large instead of infinite.
SMOOTHING = 0.5


def stability_index(counts: Sequence[int]) -> float:
    """PSI of counts a bin against the uniform: sum of (p - q) ln(p / q), 0 when they are equal, never negative."""
    expected = 1 / len(counts)
    total = sum(counts) + SMOOTHING * len(counts)
    shares = [(count + SMOOTHING) / total for count in counts]
    return math.fsum((share - expected) * math.log(share / expected) for share in shares)


class ScoreDrift:
    """The index over the last `window` scores of one version, none of them older than an hour.

    Scores come from the event loop and are asked for by the thread that answers Prometheus, hence the lock.
    """

    def __init__(self, window: int = 2000, minimum: int = 200, clock: Callable[[], float] = time.monotonic) -> None:
        self._window, self._minimum, self._clock = window, minimum, clock
        self._lock = Lock()
        self._seen: deque[tuple[float, int]] = deque()  # when, and in which bin
        self._counts = [0] * BINS

    def observe(self, score: float) -> None:
        """One image was answered with this calibrated score."""
        if not 0 <= score <= 1:  # nor is it a number then; an answer must not fail because of a metric
            return
        place = min(int(score * BINS), BINS - 1)
        with self._lock:
            self._seen.append((self._clock(), place))
            self._counts[place] += 1
            self._forget_old()

    def reset(self) -> None:
        """Another version answers: its scores are quantiles among other images."""
        with self._lock:
            self._seen.clear()
            self._counts = [0] * BINS

    @property
    def samples(self) -> int:
        """Scores in the window."""
        with self._lock:
            self._forget_old()
            return len(self._seen)

    @property
    def index(self) -> float | None:
        """PSI of the window; None while there are too few scores to say anything."""
        with self._lock:
            self._forget_old()
            return stability_index(self._counts) if len(self._seen) >= self._minimum else None

    def _forget_old(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        while self._seen and (len(self._seen) > self._window or self._seen[0][0] < oldest):
            _, place = self._seen.popleft()
            self._counts[place] -= 1
