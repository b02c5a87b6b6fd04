"""The requests of the API and the rules for repeating them, shared by both clients."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx2 as httpx
from pydantic import BaseModel, ValidationError

from service.wire.classes import Classes
from service.wire.novelties import ChangedNovelties, Novelties, NoveltyState
from service.wire.predictions import Prediction, Predictions
from service.wire.problems import Problem
from service.wire.tasks import TaskAnswer
from service.wire.versions import Versions

URL = "http://127.0.0.1:8000"
TIMEOUT = 30.0
FIRST_PAUSE, MAX_PAUSE = 0.1, 5.0  # seconds between attempts, without a Retry-After
REPEATED_STATUSES = {429, 503}
MIN_ATTEMPT = 0.05  # seconds
TEACH_TIMEOUT = 600.0  # seconds for uploading a zip, at least
CHUNK = 2**18  # bytes of a file that are in memory at once

Image = bytes | Path
Reply = httpx.Response | httpx.TransportError
M = TypeVar("M", bound=BaseModel)


class ClientError(Exception):
    """Base of the errors below."""


class ApiError(ClientError):
    """The server refused the request: `code` is stable, `detail` is for people, `problems` lists several problems."""

    def __init__(
        self, status: int, code: str, detail: str, request_id: str | None = None, problems: Sequence[str] = ()
    ) -> None:
        super().__init__(f"{detail} ({status} {code})")
        self.status, self.code, self.detail, self.request_id = status, code, detail, request_id
        self.problems = list(problems)


class Unreachable(ClientError):
    """No server answered before the timeout."""


@dataclass(frozen=True)
class Call(Generic[M]):
    """One request and the type of its answer."""

    answer: type[M]
    method: str
    path: str
    arguments: Mapping[str, Any]
    timeout: float

    def attempts(self) -> Generator[tuple[float, float], Reply, M]:
        """Yields the pause before an attempt and its timeout; is sent the reply, and returns the answer."""
        end, pause, wait = time.monotonic() + self.timeout, FIRST_PAUSE, 0.0
        while True:
            reply = yield wait, max(end - time.monotonic() - wait, MIN_ATTEMPT)
            if isinstance(reply, httpx.Response) and reply.status_code not in REPEATED_STATUSES:
                return self._parse(reply)
            # Jitter, so that many clients do not repeat at the same moment.
            wait = (_retry_after(reply) or pause) * random.uniform(1.0, 1.25)
            pause = min(pause * 2, MAX_PAUSE)
            if time.monotonic() + wait >= end:
                if isinstance(reply, httpx.Response):
                    return self._parse(reply)
                raise Unreachable(f"no answer within {self.timeout:g} s ({reply}): is the server running?") from reply

    def _parse(self, response: httpx.Response) -> M:
        if not response.is_success:
            raise _api_error(response)
        try:
            return self.answer.model_validate_json(response.content)
        except ValidationError as error:
            raise ApiError(
                response.status_code, "unknown", f"not an answer of openworld: {response.text[:200]!r}"
            ) from error


def _retry_after(reply: Reply) -> float | None:
    text = reply.headers.get("retry-after", "") if isinstance(reply, httpx.Response) else ""
    return float(text) if text.isdecimal() else None


def _api_error(response: httpx.Response) -> ApiError:
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:  # not from openworld, for example from a proxy
        return ApiError(response.status_code, "unknown", response.text[:200])
    problems = [one["detail"] for one in problem.errors or []]
    return ApiError(response.status_code, problem.code, problem.detail, problem.request_id, problems)


def options(url: str, key: str | None, timeout: float) -> dict[str, Any]:
    """The arguments of httpx's clients."""
    return {"base_url": url, "headers": {"Authorization": f"Bearer {key}"} if key else {}, "timeout": timeout}


# The requests


def predict(images: Sequence[Image], version: int | None, timeout: float) -> Call[Predictions]:
    headers = {"X-Request-Timeout": f"{timeout:g}"}
    arguments: dict[str, Any] = {"params": {} if version is None else {"version": version}, "headers": headers}
    data = [image.read_bytes() if isinstance(image, Path) else image for image in images]
    if len(data) == 1:
        arguments["content"] = data[0]
        headers["Content-Type"] = "application/octet-stream"
    else:
        arguments["files"] = [("images", (f"{number}.image", one)) for number, one in enumerate(data)]
    return Call(Predictions, "POST", "/predict", arguments, timeout)


def single(predictions: Predictions) -> Prediction:
    """The answer to a request with one image: an image that cannot be read is an ApiError."""
    answer = predictions.predictions[0]
    assert isinstance(answer, Prediction)
    return answer


def versions(timeout: float) -> Call[Versions]:
    return Call(Versions, "GET", "/versions", {}, timeout)


def activate(version: int, reason: str, replacing: int | None, timeout: float) -> Call[Versions]:
    params: dict[str, Any] = {"reason": reason} | ({} if replacing is None else {"replacing": replacing})
    return Call(Versions, "POST", f"/versions/{version}/activate", {"params": params}, timeout)


def classes(timeout: float) -> Call[Classes]:
    return Call(Classes, "GET", "/classes", {}, timeout)


@dataclass(frozen=True)
class FileContent:
    """The bytes of a file, read in chunks, and again for every attempt."""

    path: Path

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


@dataclass(frozen=True)
class AsyncFileContent:
    """The same for the asynchronous client."""

    path: Path

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in FileContent(self.path):
            yield chunk


def teach_zip(
    zipped: bytes | Path, key: str | None, timeout: float, content: type[FileContent | AsyncFileContent]
) -> Call[TaskAnswer]:
    headers = {"Content-Type": "application/zip"} | ({"Idempotency-Key": key} if key else {})
    if isinstance(zipped, bytes):
        return Call(TaskAnswer, "POST", "/tasks", {"content": zipped, "headers": headers}, timeout)
    headers["Content-Length"] = str(zipped.stat().st_size)
    return Call(TaskAnswer, "POST", "/tasks", {"content": content(zipped), "headers": headers}, timeout)


def teach_ids(labels: Mapping[str, Sequence[str]], key: str | None, timeout: float) -> Call[TaskAnswer]:
    headers = {"Idempotency-Key": key} if key else {}
    return Call(TaskAnswer, "POST", "/tasks", {"json": {"classes": dict(labels)}, "headers": headers}, timeout)


def novelties(state: NoveltyState, before: int | None, timeout: float) -> Call[Novelties]:
    params = {"state": state, "limit": 200} | ({} if before is None else {"before": before})
    return Call(Novelties, "GET", "/novelties", {"params": params}, timeout)


def dismiss(ids: Sequence[str], timeout: float) -> Call[ChangedNovelties]:
    return Call(ChangedNovelties, "POST", "/novelties/dismiss", {"json": {"ids": list(ids)}}, timeout)


def task(id: str, timeout: float) -> Call[TaskAnswer]:
    return Call(TaskAnswer, "GET", f"/tasks/{quote(id, safe='')}", {}, timeout)
