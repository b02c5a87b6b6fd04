"""The client for asyncio. `sync.py` is the same, line for line, without `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import httpx2 as httpx
from pydantic import BaseModel

from service.client import calls
from service.client.calls import TIMEOUT, URL, Call, Image
from service.wire.classes import Classes
from service.wire.novelties import NoveltyAnswer, NoveltyState
from service.wire.predictions import Failure, Prediction
from service.wire.tasks import TaskAnswer
from service.wire.versions import Versions

M = TypeVar("M", bound=BaseModel)


class AsyncClient:
    """The client for asyncio. Tasks may share one client."""

    def __init__(self, url: str = URL, key: str | None = None, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self._http = httpx.AsyncClient(**calls.options(url, key, timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def predict(self, image: Image, *, version: int | None = None, timeout: float | None = None) -> Prediction:
        """The answer to one image; ApiError when the image cannot be read."""
        return calls.single(await self._send(calls.predict([image], version, timeout or self._timeout)))

    async def predict_many(
        self, images: Sequence[Image], *, version: int | None = None, timeout: float | None = None
    ) -> list[Prediction | Failure]:
        """One entry per image, in order; a Failure for an image that cannot be read."""
        found = await self._send(calls.predict(images, version, timeout or self._timeout))
        return found.predictions

    async def teach(self, labels: Mapping[str, Sequence[str]], *, idempotency_key: str | None = None) -> TaskAnswer:
        """Submit a batch: per class, the ids of novelties or predictions."""
        return await self._send(calls.teach_ids(labels, idempotency_key, self._timeout))

    async def teach_zip(self, zipped: bytes | Path, *, idempotency_key: str | None = None) -> TaskAnswer:
        """Submit a batch: a zip with one folder per class. A file is read as it is sent."""
        timeout = max(self._timeout, calls.TEACH_TIMEOUT)
        return await self._send(calls.teach_zip(zipped, idempotency_key, timeout, calls.AsyncFileContent))

    async def task(self, id: str) -> TaskAnswer:
        """The state, progress and result of a task."""
        return await self._send(calls.task(id, self._timeout))

    async def novelties(self, state: NoveltyState = "new") -> AsyncIterator[NoveltyAnswer]:
        """All novelties in a state, last seen first. Reads the pages as needed."""
        before: int | None = None
        while True:
            page = await self._send(calls.novelties(state, before, self._timeout))
            for novelty in page.items:
                yield novelty
            if (before := page.next_cursor) is None:
                return

    async def dismiss(self, ids: Sequence[str]) -> list[str]:
        """Dismiss novelties; returns those that were new. No error when none exists."""
        try:
            return (await self._send(calls.dismiss(ids, self._timeout))).changed
        except calls.ApiError as error:
            if error.code != "not_found":
                raise
            return []

    async def classes(self) -> Classes:
        return await self._send(calls.classes(self._timeout))

    async def versions(self) -> Versions:
        return await self._send(calls.versions(self._timeout))

    async def activate(
        self, version: int, reason: str = "requested by a client", *, replacing: int | None = None
    ) -> Versions:
        """Make a version current: roll back or forward."""
        return await self._send(calls.activate(version, reason, replacing, self._timeout))

    async def _send(self, call: Call[M]) -> M:
        attempts = call.attempts()
        wait, timeout = next(attempts)
        while True:
            await asyncio.sleep(wait)
            reply: calls.Reply
            try:
                reply = await self._http.request(call.method, call.path, timeout=timeout, **call.arguments)
            except httpx.TransportError as error:
                reply = error
            try:
                wait, timeout = attempts.send(reply)
            except StopIteration as done:
                answer: M = done.value
                return answer
