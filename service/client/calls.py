"""What can be asked of a server, and when to ask again: all of the client but the sending."""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx2 as httpx
from pydantic import BaseModel, ValidationError

from service.wire.classes import Classes
from service.wire.novelties import Changed, Novelties, NoveltyState
from service.wire.predictions import Prediction, Predictions
from service.wire.tasks import TaskAnswer
from service.wire.versions import Versions

URL = "http://127.0.0.1:8000"
TIMEOUT = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts when the server did not say
WAIT_FOR = {429, 503}
SHORTEST_ATTEMPT = 0.05

Image = bytes | Path
Outcome = httpx.Response | httpx.TransportError
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
    """One request, whichever client sends it, and the type of its answer."""

    kind: type[M]
    method: str
    path: str
    arguments: Mapping[str, Any]
    timeout: float

    def attempts(self) -> Generator[tuple[float, float], Outcome, M]:
        """When to try again and when to give up: yields the pause before an attempt, and how long that may take.

        Both clients drive it, so that what waits and what does not is decided once.
        """
        end, pause, wait = time.monotonic() + self.timeout, FIRST_PAUSE, 0.0
        while True:
            outcome = yield wait, max(end - time.monotonic() - wait, SHORTEST_ATTEMPT)
            if isinstance(outcome, httpx.Response) and outcome.status_code not in WAIT_FOR:
                return self._parse(outcome)
            # A little chance, so that a thousand robots do not come back in the same instant.
            wait = (_retry_after(outcome) or pause) * random.uniform(1.0, 1.25)
            pause = min(pause * 2, LONGEST_PAUSE)
            if time.monotonic() + wait >= end:
                if isinstance(outcome, httpx.Response):
                    return self._parse(outcome)
                raise Unreachable(f"no answer in {self.timeout:g} s ({outcome}): is the server running?") from outcome

    def _parse(self, response: httpx.Response) -> M:
        if not response.is_success:
            raise _refusal(response)
        try:
            return self.kind.model_validate_json(response.content)
        except ValidationError as error:
            raise ApiError(response.status_code, "unknown", f"not an answer of ours: {response.text[:200]}") from error


def _retry_after(outcome: Outcome) -> float | None:
    text = outcome.headers.get("retry-after", "") if isinstance(outcome, httpx.Response) else ""
    return float(text) if text.isdecimal() else None


def _refusal(response: httpx.Response) -> ApiError:
    status = response.status_code
    try:
        problem = response.json()
        several = [one["detail"] for one in problem.get("errors", [])]
        return ApiError(status, problem["code"], problem["detail"], problem.get("request_id"), several)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not ours: a proxy in between.
        return ApiError(status, "unknown", response.text[:200])


def options(url: str, key: str | None, timeout: float) -> dict[str, Any]:
    """Of httpx, the same for both clients."""
    return {"base_url": url, "headers": {"Authorization": f"Bearer {key}"} if key else {}, "timeout": timeout}


# What can be asked


def predict(images: Sequence[Image], version: int | None, timeout: float) -> Call[Predictions]:
    headers = {"X-Request-Timeout": f"{timeout:g}"}
    arguments: dict[str, Any] = {"params": {} if version is None else {"version": version}, "headers": headers}
    data = [image.read_bytes() if isinstance(image, Path) else image for image in images]
    if len(data) == 1:
        arguments["content"] = data[0]
        headers["Content-Type"] = "application/octet-stream"
    else:
        arguments["files"] = [("images", (f"{place}.image", one)) for place, one in enumerate(data)]
    return Call(Predictions, "POST", "/predict", arguments, timeout)


def only(predictions: Predictions) -> Prediction:
    """Of one image; one that cannot be read was an ApiError."""
    answer = predictions.predictions[0]
    assert isinstance(answer, Prediction)
    return answer


def versions(timeout: float) -> Call[Versions]:
    return Call(Versions, "GET", "/versions", {}, timeout)


def activate(version: int, reason: str, timeout: float) -> Call[Versions]:
    return Call(Versions, "POST", f"/versions/{version}/activate", {"params": {"reason": reason}}, timeout)


def classes(timeout: float) -> Call[Classes]:
    return Call(Classes, "GET", "/classes", {}, timeout)


def teach_zip(data: bytes, key: str | None, timeout: float) -> Call[TaskAnswer]:
    headers = {"Content-Type": "application/zip"} | ({"Idempotency-Key": key} if key else {})
    return Call(TaskAnswer, "POST", "/tasks", {"content": data, "headers": headers}, timeout)


def teach_ids(labels: Mapping[str, Sequence[str]], key: str | None, timeout: float) -> Call[TaskAnswer]:
    headers = {"Idempotency-Key": key} if key else {}
    return Call(TaskAnswer, "POST", "/tasks", {"json": {"classes": dict(labels)}, "headers": headers}, timeout)


def novelties(state: NoveltyState, before: int | None, timeout: float) -> Call[Novelties]:
    params = {"state": state, "limit": 200} | ({} if before is None else {"before": before})
    return Call(Novelties, "GET", "/novelties", {"params": params}, timeout)


def dismiss(ids: Sequence[str], timeout: float) -> Call[Changed]:
    return Call(Changed, "POST", "/novelties/dismiss", {"json": {"ids": list(ids)}}, timeout)


def task(id: str, timeout: float) -> Call[TaskAnswer]:
    return Call(TaskAnswer, "GET", f"/tasks/{quote(id, safe='')}", {}, timeout)
