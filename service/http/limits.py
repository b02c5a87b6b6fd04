"""Limits of requests: the size and deadline of one, the images and bytes of all, and the rate per key."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from starlette.requests import Request

from service.errors import ClientDisconnected, DeadlinePassed, Overloaded, RateLimited
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


class Admission:
    """Counts the images and bytes of all requests in progress."""

    def __init__(self, max_images: int, max_bytes: int, seconds_per_image: Callable[[], float]) -> None:
        self._max_images, self._max_bytes = max_images, max_bytes
        self._seconds_per_image = seconds_per_image
        self.images = self.bytes = 0

    def enter(self) -> Permit:
        """A permit for one image, taken before the body is read; `grow` it as bytes and images arrive."""
        if self.images >= max(1, int(ADMISSION_RATIO * self._max_images)):
            raise self._overloaded()
        permit = Permit(self)
        permit.grow(images=1)
        return permit

    def reserve(self, images: int, size: int) -> None:
        if self.images + images > self._max_images or self.bytes + size > self._max_bytes:
            raise self._overloaded()
        self.images += images
        self.bytes += size

    def release(self, images: int, size: int) -> None:
        self.images -= images
        self.bytes -= size

    def _overloaded(self) -> Overloaded:
        wait = min(MAX_RETRY_AFTER, self.images * self._seconds_per_image())
        return Overloaded("the server is at its limit: send fewer images at once, or try again later", wait)


class Permit:
    """The admission of one request. Leaving its `with` block releases all of it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._images = self._bytes = 0

    def grow(self, *, images: int = 0, size: int = 0) -> None:
        """Reserve more images or bytes; Overloaded if the server has no room for them."""
        self._admission.reserve(images, size)
        self._images += images
        self._bytes += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.release(self._images, self._bytes)
        self._images = self._bytes = 0


class RateLimiter:
    """Images per second and key; 0: no limit. A burst of two seconds, or of one full request, is allowed."""

    def __init__(self, rate: float, max_images: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        burst = max(rate * BURST_SECONDS, max_images)
        self._buckets = defaultdict[str, TokenBucket](lambda: TokenBucket(rate, burst, clock))

    def take(self, client: str, images: int) -> None:
        if self._rate and (wait := self._buckets[client].take(images)) > 0:
            raise RateLimited(f"key {client!r} may send {self._rate:g} images per second: slow down", wait)
