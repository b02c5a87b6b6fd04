"""Limits of requests: the size and deadline of one, the images and bytes of all and of one key, the rate per key."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from starlette.requests import Request

from service.errors import ClientDisconnected, DeadlinePassed, KeyBusy, Overloaded, RateLimited
from service.token_bucket import TokenBucket

MAX_RETRY_AFTER = 30.0  # seconds: the wait is estimated, so it is capped
BURST_SECONDS = 2.0
ADMISSION_RATIO = 0.75  # reject new requests above this share; admitted multipart bodies may still grow

T = TypeVar("T")


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request with images: bytes, images, bytes per image, and seconds."""

    body: int
    images: int
    image: int
    timeout: float
    max_timeout: float

    def deadline(self, timeout: float | None) -> float:
        """The time, by `time.monotonic`, at which the answer is due; `timeout` is what the client asks for."""
        return time.monotonic() + min(timeout or self.timeout, self.max_timeout)


async def finish_by(deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. DeadlinePassed cancels it."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await work
    except TimeoutError as error:
        raise _deadline_passed() from error


async def finish_while_connected(request: Request, deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. DeadlinePassed and ClientDisconnected cancel it. Call it after the body was read."""
    task = asyncio.create_task(work)
    disconnect = asyncio.ensure_future(request.receive())  # after the body, nothing else can arrive
    try:
        await asyncio.wait({task, disconnect}, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if disconnect.done():
            raise ClientDisconnected("the client disconnected before the response")
        raise _deadline_passed()
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _deadline_passed() -> DeadlinePassed:
    return DeadlinePassed("no answer before the deadline: send fewer images, or allow more time with X-Request-Timeout")


@dataclass(frozen=True, slots=True)
class Quota:
    """What may be in progress at once: images (or batches), and bytes of their bodies."""

    images: int
    bytes: int

    def __add__(self, other: Quota) -> Quota:
        return Quota(self.images + other.images, self.bytes + other.bytes)

    def __sub__(self, other: Quota) -> Quota:
        return Quota(self.images - other.images, self.bytes - other.bytes)

    def share(self, share: float, at_least: Quota) -> Quota:
        """The part that one key may use: a share, but at least its largest request."""
        return Quota(max(at_least.images, int(share * self.images)), max(at_least.bytes, int(share * self.bytes)))

    def exceeds(self, limit: Quota) -> bool:
        return self.images > limit.images or self.bytes > limit.bytes


NOTHING = Quota(0, 0)


class Admission:
    """Counts the images and bytes of all requests in progress, and those of each key.

    A key has a limit of its own, so that a client that stalls cannot take what the others need. A server without keys
    (`has_keys`) cannot tell its clients apart: together they may use all of it.
    """

    def __init__(
        self,
        limit: Quota,
        per_key: Quota,
        seconds_per_image: Callable[[], float],
        ratio: float = ADMISSION_RATIO,
        has_keys: Callable[[], bool] = lambda: True,
    ) -> None:
        self._limit, self._per_key, self._has_keys = limit, per_key, has_keys
        self._seconds_per_image = seconds_per_image
        self._first = max(1, int(ratio * limit.images))
        self.in_use = NOTHING
        self._by_key: dict[str, Quota] = {}

    def enter(self, client: str) -> Permit:
        """A permit for one image, taken before the body is read; `grow` it as bytes and images arrive."""
        if self.in_use.images >= self._first:
            raise self._overloaded()
        permit = Permit(self, client)
        permit.grow(images=1)
        return permit

    def reserve(self, client: str, more: Quota) -> None:
        of_key = self._by_key.get(client, NOTHING) + more
        if of_key.exceeds(self._per_key) and self._has_keys():
            raise KeyBusy(f"key {client!r} has too much in progress: wait for answers, or try again", self._wait())
        if (self.in_use + more).exceeds(self._limit):
            raise self._overloaded()
        self.in_use += more
        self._by_key[client] = of_key

    def release(self, client: str, held: Quota) -> None:
        self.in_use -= held
        left = self._by_key.get(client, NOTHING) - held
        if left == NOTHING:
            self._by_key.pop(client, None)
        else:
            self._by_key[client] = left

    def _overloaded(self) -> Overloaded:
        return Overloaded("the server is at its limit: send fewer images at once, or try again later", self._wait())

    def _wait(self) -> float:
        return min(MAX_RETRY_AFTER, self.in_use.images * self._seconds_per_image())


class Permit:
    """The admission of one request. Leaving its `with` block releases all of it."""

    def __init__(self, admission: Admission, client: str) -> None:
        self._admission, self._client = admission, client
        self._held = NOTHING

    def grow(self, *, images: int = 0, size: int = 0) -> None:
        """Reserve more images or bytes; Overloaded or KeyBusy if there is no room for them."""
        more = Quota(images, size)
        self._admission.reserve(self._client, more)
        self._held += more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.release(self._client, self._held)
        self._held = NOTHING


class RateLimiter:
    """Images per second and key; 0: no limit. A burst of two seconds, or of one full request, is allowed."""

    def __init__(self, rate: float, max_images: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst = rate, max(rate * BURST_SECONDS, max_images)
        self._buckets = defaultdict[str, TokenBucket](lambda: TokenBucket(rate, self._burst, clock))

    async def admit(self, client: str, images: int, paid: int = 0) -> None:
        """`take`, where another server may have to be asked."""
        self.take(client, images, paid)

    def take(self, client: str, images: int, paid: int = 0) -> None:
        """Take a token per image, except for `paid` ones that this request has taken; RateLimited gives them back."""
        if not self._rate:
            return
        bucket = self._buckets[client]
        bucket.give_back(paid)
        if (wait := bucket.take(images)) > 0:
            raise RateLimited(f"key {client!r} may send {self._rate:g} images per second: slow down", wait)

    def close(self) -> None:
        """Nothing to release."""
