"""A typed Python client, for programs and for asyncio. Install `openworld[client]`.

    with Client("http://127.0.0.1:8000") as openworld:
        answer = openworld.predict(Path("photo.jpg"))
        print("novel" if answer.novel else answer.label)

A server that is busy or about to be replaced says so (429, 503) and when to come back (`Retry-After`); clients wait
that long and try again, as they do when a connection breaks, until `timeout` has passed. Asking twice does no harm:
a prediction changes nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2 as httpx
from pydantic import BaseModel

from models.errors import OpenWorldError
from service.schemas import Failure, Prediction, Predictions, Versions

Image = bytes | Path
M = TypeVar("M", bound=BaseModel)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts when the server did not say
WAIT_FOR = {429, 503}


class ApiError(OpenWorldError):
    """The server refused; `code` is stable, `detail` is for people."""

    def __init__(self, status: int, code: str, detail: str, request_id: str | None = None) -> None:
        super().__init__(f"{detail} ({status} {code})")
        self.status, self.code, self.detail, self.request_id = status, code, detail, request_id


class Unreachable(OpenWorldError):
    """No server answered in time."""


@dataclass(frozen=True)
class _Call:
    """One request, whichever client sends it."""

    method: str
    path: str
    arguments: dict[str, Any]
    timeout: float

    def attempts(self) -> Generator[float, httpx.Response | httpx.TransportError, httpx.Response]:
        """When to try again and when to give up, without a word on how: yields the pause before each attempt.

        Both clients drive it, so that what waits and what does not is decided once.
        """
        end, pause, wait = time.monotonic() + self.timeout, FIRST_PAUSE, 0.0
        while True:
            outcome = yield wait
            if isinstance(outcome, httpx.Response) and outcome.status_code not in WAIT_FOR:
                return outcome
            # A little chance, so that a thousand robots do not come back in the same instant.
            wait = (_retry_after(outcome) or pause) * random.uniform(1.0, 1.25)
            pause = min(pause * 2, LONGEST_PAUSE)
            if time.monotonic() + wait >= end:
                if isinstance(outcome, httpx.Response):
                    return outcome
                raise Unreachable(f"no answer in {self.timeout:g} s ({outcome}): is the server running?") from outcome


def _retry_after(outcome: httpx.Response | httpx.TransportError) -> float | None:
    text = outcome.headers.get("retry-after", "") if isinstance(outcome, httpx.Response) else ""
    return float(text) if text.isdecimal() else None


def _parse(response: httpx.Response, kind: type[M]) -> M:
    if response.is_success:
        return kind.model_validate_json(response.content)
    try:
        problem = response.json()
        raise ApiError(response.status_code, problem["code"], problem["detail"], problem.get("request_id"))
    except (ValueError, KeyError, TypeError):
        # Not ours: a proxy in between.
        raise ApiError(response.status_code, "unknown", response.text[:200]) from None


def _predict(images: Sequence[Image], version: int | None, timeout: float) -> _Call:
    arguments: dict[str, Any] = {
        "params": {} if version is None else {"version": version},
        "headers": {"X-Request-Timeout": f"{timeout:g}"},
    }
    data = [image.read_bytes() if isinstance(image, Path) else image for image in images]
    if len(data) == 1:
        arguments["content"] = data[0]
        arguments["headers"]["Content-Type"] = "application/octet-stream"
    else:
        arguments["files"] = [("images", (f"{place}.image", one)) for place, one in enumerate(data)]
    return _Call("POST", "/predict", arguments, timeout)


def _versions(timeout: float) -> _Call:
    return _Call("GET", "/versions", {}, timeout)


def _activate(version: int, reason: str, timeout: float) -> _Call:
    return _Call("POST", f"/versions/{version}/activate", {"params": {"reason": reason}}, timeout)


def _only(predictions: Predictions) -> Prediction:
    answer = predictions.predictions[0]
    assert isinstance(answer, Prediction)  # one image that cannot be read is an ApiError
    return answer


class _Base:
    def __init__(self, url: str = "http://127.0.0.1:8000", key: str | None = None, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": timeout,
        }


class Client(_Base):
    """For programs. One client may be used by several threads."""

    def __init__(self, url: str = "http://127.0.0.1:8000", key: str | None = None, timeout: float = 30.0) -> None:
        super().__init__(url, key, timeout)
        self._http = httpx.Client(**self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def predict(self, image: Image, *, version: int | None = None, timeout: float | None = None) -> Prediction:
        """The answer to one image; ApiError when it cannot be read."""
        return _only(self._send(_predict([image], version, timeout or self._timeout), Predictions))

    def predict_many(
        self, images: Sequence[Image], *, version: int | None = None, timeout: float | None = None
    ) -> list[Prediction | Failure]:
        """An entry an image, in order; one that cannot be read has a Failure in its place."""
        return self._send(_predict(images, version, timeout or self._timeout), Predictions).predictions

    def versions(self) -> Versions:
        return self._send(_versions(self._timeout), Versions)

    def activate(self, version: int, reason: str = "asked for by a client") -> Versions:
        """Roll back or forward."""
        return self._send(_activate(version, reason, self._timeout), Versions)

    def _send(self, call: _Call, kind: type[M]) -> M:
        attempts = call.attempts()
        wait = next(attempts)
        while True:
            time.sleep(wait)
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(call.method, call.path, **call.arguments)
            except httpx.TransportError as error:
                outcome = error
            try:
                wait = attempts.send(outcome)
            except StopIteration as done:
                return _parse(done.value, kind)


class AsyncClient(_Base):
    """The same for asyncio."""

    def __init__(self, url: str = "http://127.0.0.1:8000", key: str | None = None, timeout: float = 30.0) -> None:
        super().__init__(url, key, timeout)
        self._http = httpx.AsyncClient(**self._options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def predict(self, image: Image, *, version: int | None = None, timeout: float | None = None) -> Prediction:
        """The answer to one image; ApiError when it cannot be read."""
        return _only(await self._send(_predict([image], version, timeout or self._timeout), Predictions))

    async def predict_many(
        self, images: Sequence[Image], *, version: int | None = None, timeout: float | None = None
    ) -> list[Prediction | Failure]:
        """An entry an image, in order; one that cannot be read has a Failure in its place."""
        return (await self._send(_predict(images, version, timeout or self._timeout), Predictions)).predictions

    async def versions(self) -> Versions:
        return await self._send(_versions(self._timeout), Versions)

    async def activate(self, version: int, reason: str = "asked for by a client") -> Versions:
        """Roll back or forward."""
        return await self._send(_activate(version, reason, self._timeout), Versions)

    async def _send(self, call: _Call, kind: type[M]) -> M:
        attempts = call.attempts()
        wait = next(attempts)
        while True:
            await asyncio.sleep(wait)
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = await self._http.request(call.method, call.path, **call.arguments)
            except httpx.TransportError as error:
                outcome = error
            try:
                wait = attempts.send(outcome)
            except StopIteration as done:
                return _parse(done.value, kind)
