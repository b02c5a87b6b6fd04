"""The only place where errors become HTTP responses: RFC 9457 problem details with a stable `code`."""

from __future__ import annotations

import math
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from models import errors as core
from models.files import is_unusable
from models.storage import is_unavailable
from service import errors
from service.wire.problems import Problem
from tasks import errors as task_errors

MEDIA_TYPE = "application/problem+json"
DEFAULT_RETRY_AFTER = "5"  # seconds

# (error, status, code, title); the first line whose class fits applies, so subclasses come first.
TABLE: list[tuple[type[core.OpenWorldError], int, str, str]] = [
    (errors.BadBase64, 422, "bad_base64", "The image is not base64"),
    (core.UnsupportedImage, 415, "unsupported_image", "The image format is not supported"),
    (core.ImageTooLarge, 413, "image_too_large", "The image is too large"),
    (core.BrokenImage, 422, "broken_image", "The image is damaged"),
    (errors.NoImages, 422, "no_images", "The request contains no image"),
    (errors.BodyTooLarge, 413, "body_too_large", "The request is too large"),
    (errors.BodyTooSlow, 408, "body_too_slow", "The body arrives too slowly"),
    (errors.UnsupportedBody, 415, "unsupported_body", "The content type is not supported here"),
    (errors.InvalidName, 422, "invalid_name", "A class cannot have this name"),
    (errors.BadRequest, 400, "bad_request", "The request is malformed"),
    (errors.Unauthorized, 401, "unauthorized", "A valid key is required"),
    (errors.Forbidden, 403, "forbidden", "The key lacks the role"),
    (errors.ForeignOrigin, 403, "foreign_origin", "A page of another site sent the request"),
    (errors.UnknownHost, 421, "unknown_host", "The request is for another host"),
    (errors.NotFound, 404, "not_found", "There is no such resource"),
    (errors.ImagesDiscarded, 410, "images_discarded", "The images were discarded"),
    (errors.KeyBusy, 429, "key_busy", "The key has too much in progress"),
    (errors.Overloaded, 429, "queue_full", "The server is overloaded"),
    (errors.RateLimited, 429, "rate_limited", "The key exceeds its rate limit"),
    (errors.TooManyStreams, 429, "too_many_streams", "The key follows too many tasks"),
    (errors.NotReady, 503, "not_ready", "The server is not ready"),
    (errors.InboxMoved, 503, "inbox_moved", "The inbox moves to another server"),
    (errors.NoQueue, 503, "no_queue", "The server has no task queue"),
    (errors.DeadlinePassed, 504, "deadline_passed", "The deadline has passed"),
    (errors.ClientDisconnected, 499, "abandoned", "The client disconnected"),
    (errors.StorageUnavailable, 507, "storage_unavailable", "The data folder is full or cannot be used"),
    (errors.ObjectStoreDown, 503, "store_unavailable", "The object store does not answer"),
    (errors.VersionUnusable, 409, "version_unusable", "The version cannot be loaded"),
    (core.CorruptVersion, 409, "version_unusable", "The version cannot be loaded"),
    (core.StaleParent, 409, "version_conflict", "Another version became current"),
    (errors.ImageInUse, 409, "image_in_use", "Versions or tasks depend on the image"),
    (task_errors.BatchError, 422, "batch_invalid", "The batch is invalid"),
    (core.UnknownClass, 404, "unknown_class", "There is no such class"),
    (core.ClassConflict, 409, "class_conflict", "The change conflicts with the existing classes"),
    (core.NothingLearned, 409, "nothing_learned", "Nothing has been learned yet"),
    (task_errors.UnknownTask, 404, "unknown_task", "There is no such task"),
    (task_errors.WrongState, 409, "wrong_state", "The task is in another state"),
    (task_errors.IdempotencyConflict, 409, "idempotency_conflict", "The key was used for another batch"),
    (task_errors.QueueFull, 429, "task_queue_full", "The task queue is full"),
    (task_errors.TaskNotReplicated, 503, "task_not_replicated", "No replica of Redis has confirmed the task"),
    (task_errors.QueueUnavailable, 503, "queue_unavailable", "The task queue is unreachable"),
    (core.OpenWorldError, 500, "internal", "Internal server error"),
]


STORE_UNAVAILABLE = errors.ObjectStoreDown("predictions go on; send the request again later")
STORAGE_UNAVAILABLE = errors.StorageUnavailable(
    "an operator must free space or restore the right to write: see the server's log for this request id"
)


def problem_of(error: BaseException) -> Problem:
    status, code, title = _entry(error)
    if status == 500 and (is_unavailable(error) or is_unusable(error)):  # whatever part of the server found it
        error = STORE_UNAVAILABLE if is_unavailable(error) else STORAGE_UNAVAILABLE
        status, code, title = _entry(error)
    detail = str(error) if status != 500 else "see the server's log for this request id"
    lines: list[str] | None = None
    if isinstance(error, task_errors.BatchError):
        lines = error.problems
    elif isinstance(error, errors.ImageInUse):
        lines = error.dependents
    details = [{"detail": line} for line in lines] if lines is not None else None
    return Problem(title=title, status=status, code=code, detail=detail, errors=details)


def _entry(error: BaseException) -> tuple[int, str, str]:
    return next(((s, c, t) for kind, s, c, t in TABLE if isinstance(error, kind)), TABLE[-1][1:])


def respond(problem: Problem, request: Request, error: BaseException | None = None) -> JSONResponse:
    headers = {}
    if isinstance(error, errors.RetryLater):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif problem.status in (429, 503):
        headers["Retry-After"] = DEFAULT_RETRY_AFTER
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HTTPException) and error.headers:
        headers |= error.headers  # for example Allow of a 405
    problem = problem.model_copy(update={"request_id": request.scope.get("request_id")})
    return JSONResponse(
        problem.model_dump(exclude_none=True), status_code=problem.status, headers=headers, media_type=MEDIA_TYPE
    )


async def on_openworld_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, core.OpenWorldError)
    request.scope["error"] = error
    return respond(problem_of(error), request, error)


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Without the input, which may be large or a secret.
    found = [{"where": ".".join(map(str, one["loc"])), "detail": one["msg"]} for one in error.errors()]
    problem = Problem(
        title="A parameter is not valid",
        status=422,
        code="invalid",
        detail="; ".join(f"{one['where']}: {one['detail']}" for one in found),
        errors=found,
    )
    return respond(problem, request)


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Errors of the framework: an unknown path, a wrong method, a malformed body."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, core.OpenWorldError):  # FastAPI turns an error of `receive` into a 400
        return await on_openworld_error(request, error.__cause__)
    code = _HTTP_CODES.get(error.status_code, "bad_request")
    title = str(error.detail)
    detail = f"{title}: see /docs"
    if error.status_code == 405 and error.headers:
        detail = f"{request.method} is not supported: use {error.headers.get('Allow', 'another method')}"
    problem = Problem(title=title, status=error.status_code, code=code, detail=detail)
    return respond(problem, request, error)


HANDLERS: dict[Any, Any] = {
    core.OpenWorldError: on_openworld_error,
    RequestValidationError: on_invalid,
    HTTPException: on_http_error,
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of a route that can fail with these statuses."""
    titles = {status: " / ".join(dict.fromkeys(t for _, s, _, t in TABLE if s == status)) for status in statuses}
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        status: {"description": titles[status] or "A parameter is not valid", "content": {MEDIA_TYPE: schema}}
        for status in statuses
    }
