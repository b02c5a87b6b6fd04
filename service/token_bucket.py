"""The token bucket, for the rate of a key and for the rate of the inbox."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Allows `burst` tokens at once and `rate` tokens per second on average."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, float(burst), clock
        self._tokens, self._filled = self._burst, clock()

    def take(self, tokens: int = 1) -> float:
        """Take tokens and return 0; if there are too few, take none and return the seconds until there are enough."""
        now = self._clock()
        # A clock that is set back adds nothing and removes nothing.
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._filled) * self._rate)
        self._filled = now
        if self._tokens < tokens:
            return (tokens - self._tokens) / self._rate
        self._tokens -= tokens
        return 0.0

    def give_back(self, tokens: int) -> None:
        """Undo a `take`."""
        self._tokens = min(self._burst, self._tokens + tokens)
