"""Which clients send far more images than the others at the moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

HEAVY_RATIO = 2.0  # times the mean of the other active clients
WINDOW = 1.0  # seconds; a client is active for one to two of them after an image


class ClientLoad:
    """Counts images by client over the last one to two windows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: Counter[str] = Counter()
        self._before: Counter[str] = Counter()
        self._began = clock()

    def count(self, client: str) -> None:
        self._forget_old()
        self._now[client] += 1

    def is_heavy(self, client: str) -> bool:
        """Whether the client sends more than `HEAVY_RATIO` times as much as the others; never if it is the only one."""
        self._forget_old()
        others = self._now + self._before
        own = others.pop(client, 0)
        return bool(others) and own > HEAVY_RATIO * others.total() / len(others)

    def _forget_old(self) -> None:
        passed = self._clock() - self._began
        if passed >= WINDOW:
            self._before = self._now if passed < 2 * WINDOW else Counter()
            self._now = Counter()
            self._began += passed
