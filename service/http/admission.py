"""How much may be inside the server at once. A permit travels with its request, so that it cannot leak."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from service.errors import QueueIsFull, RateLimited
from service.http.auth import Key

SLOWEST_GUESS = 30.0  # seconds: nobody should be sent away for longer on an estimate
BURST_SECONDS = 2.0
DOOR = 0.75  # of the limit: above it nobody new comes in, so that who is in can still turn out to be many


class Admission:
    """Counts the images and the bytes of all requests that are being answered."""

    def __init__(self, images: int, size: int, seconds_per_image: Callable[[], float]) -> None:
        self._max_images, self._max_bytes = images, size
        self._seconds_per_image = seconds_per_image
        self.images = self.bytes = 0

    def enter(self) -> Permit:
        """A permit for one image, before a byte of it is read; `grow` says what it turned out to be."""
        if self.images >= max(1, int(DOOR * self._max_images)):
            raise self._full()
        permit = Permit(self)
        permit.grow(images=1)
        return permit

    def take(self, images: int, size: int) -> None:
        if self.images + images > self._max_images or self.bytes + size > self._max_bytes:
            raise self._full()
        self.images += images
        self.bytes += size

    def _full(self) -> QueueIsFull:
        wait = min(SLOWEST_GUESS, self.images * self._seconds_per_image())
        return QueueIsFull("the server is at its limit: send fewer at once, or try again later", wait)

    def give_back(self, images: int, size: int) -> None:
        self.images -= images
        self.bytes -= size


class Permit:
    """The right of one request to be inside; leaving the `with` block gives all of it back."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._images = self._bytes = 0

    def grow(self, *, images: int = 0, size: int = 0) -> None:
        """Ask for more room; QueueIsFull when there is none."""
        self._admission.take(images, size)
        self._images += images
        self._bytes += size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.give_back(self._images, self._bytes)
        self._images = self._bytes = 0


class RateLimiter:
    """A token bucket a key, filled with `rate` images a second up to two seconds' worth, or one large request."""

    def __init__(self, rate: float, largest: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._burst = max(rate * BURST_SECONDS, float(largest))
        self._buckets: dict[str, tuple[float, float]] = {}  # name -> (tokens, when)

    def take(self, key: Key, images: int) -> None:
        if not self._rate:
            return
        now = self._clock()
        tokens, before = self._buckets.get(key.name, (self._burst, now))
        tokens = min(self._burst, tokens + (now - before) * self._rate)
        if tokens < images:
            self._buckets[key.name] = (tokens, now)
            raise RateLimited(
                f"the key {key.name} may send {self._rate:g} images a second: slow down",
                (images - tokens) / self._rate,
            )
        self._buckets[key.name] = (tokens - images, now)
