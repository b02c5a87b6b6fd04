"""How fast the inbox may fill."""

from collections.abc import Callable


class TokenBucket:
    """`burst` at once, and then `rate` a second."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._filled = float(burst), clock()

    def take(self) -> bool:
        now = self._clock()
        # A clock that was set back gives nothing, and takes nothing away.
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._filled) * self._rate)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
