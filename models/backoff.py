"""Exponential back-off between retries."""

import random


class Backoff:
    """Pauses in seconds: `first`, then each `factor` times as long as the one before, at most `longest`.

    `jitter` is the largest share of a pause that is taken off at random, so that many processes do not retry at the
    same moment.
    """

    def __init__(self, first: float, longest: float, *, factor: float = 2.0, jitter: float = 0.0) -> None:
        self._first, self._longest, self._factor, self._jitter = min(first, longest), longest, factor, jitter
        self._pause = self._first
        self.failures = 0  # calls of `next` since the last reset

    def next(self) -> float:
        """Count a failure and return the pause before the next attempt."""
        pause = self._pause
        self.failures += 1
        self._pause = min(pause * self._factor, self._longest)
        return pause * (1 - random.uniform(0, self._jitter))

    def reset(self) -> None:
        """Start again with the first pause. Call it after a success."""
        self.failures = 0
        self._pause = self._first
