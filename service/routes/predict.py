"""POST /predict: from bytes to answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from models.errors import ImageError
from models.inference.answer import Answer
from models.inference.evidence import Array
from service.container import Container, ContainerDep, get_container
from service.http.auth import PredictKey, require_predict_key
from service.http.image_bodies import ReceivedImage, read_images
from service.http.limits import finish_by, finish_while_connected
from service.http.middleware import new_id
from service.http.problems import documented, problem_of
from service.inbox import Sighting
from service.inference.servable import ServableModel
from service.routes.pulse import pulse_of
from service.wire.predictions import Base64Images, Failure, ImageProblem, Nearest, Prediction, Predictions

router = APIRouter(tags=["robots"])
T = TypeVar("T")

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FORM = {
    "type": "object",
    "required": ["images"],
    "properties": {"images": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}},
}
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One image as it is (fastest), a form with one or more `images`, or base64 in JSON",
        "content": {
            "image/jpeg": _BINARY,
            "image/png": _BINARY,
            "image/webp": _BINARY,
            "multipart/form-data": {"schema": _FORM},
            "application/json": {"schema": Base64Images.model_json_schema()},
        },
    }
}


@router.post(
    "/predict",
    response_model=Predictions,
    summary="Name images, or say that they are novel",
    responses=documented(400, 401, 403, 404, 409, 413, 415, 422, 429, 503, 504),
    openapi_extra=BODY,
)
async def predict(
    request: Request,
    container: ContainerDep,
    key: PredictKey,
    version: Annotated[int | None, Query(ge=1, le=10**12, description="answer with this version")] = None,
    x_request_timeout: Annotated[
        float | None, Header(gt=0, le=10**6, allow_inf_nan=False, description="seconds until the answer is of no use")
    ] = None,
) -> Response:
    """One entry an image, in order. An image that cannot be read fails alone; when none can, the request fails."""
    started = time.monotonic()
    deadline = container.request_limits.deadline(x_request_timeout)
    with container.admission.enter() as permit:
        images = await finish_by(deadline, read_images(request, container.request_limits, permit))
        container.metrics.stage_seconds.labels("read").observe(time.monotonic() - started)
        container.rate_limiter.take(key.name, len(images))
        served = await finish_by(deadline, container.active_version.get(version))
        work = _answer_all(container, served, images, key.name, deadline)
        try:
            predictions = await finish_while_connected(request, deadline, work)
        except ImageError:
            pulse_of(request).unreadable(len(images))
            raise
    pulse_of(request).answered(predictions, time.monotonic() - started)
    request.scope.setdefault("log_fields", {}).update(images=len(images), version=served.version)
    return Response(
        Predictions.model_construct(predictions=predictions).model_dump_json(), media_type="application/json"
    )


class PlainPredict(Route):
    """POST /predict with neither a query nor a deadline of its own, which is nearly all of the traffic.

    There is nothing to validate, so that the framework's share of a request, a good part of a millisecond, is saved.
    Everything else goes on to the route above, which is also the one that the OpenAPI page shows.
    """

    def __init__(self) -> None:
        super().__init__("/predict", _plain, methods=["POST"])

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.FULL or scope["query_string"] or _has_deadline(scope["headers"]):
            return Match.NONE, {}
        return match, {**child, "route": self}


def _has_deadline(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(name == b"x-request-timeout" for name, _ in headers)


async def _plain(request: Request) -> Response:
    return await predict(request, await get_container(request), await require_predict_key(request))


async def _answer_all(
    container: Container, served: ServableModel, images: Sequence[ReceivedImage], client: str, deadline: float
) -> list[Prediction | Failure]:
    if len(images) == 1:
        results = [await _answer(container, served, images[0], client, deadline)]
    else:
        results = await _together([_answer(container, served, image, client, deadline) for image in images])
    errors = [result for result in results if isinstance(result, ImageError)]
    if len(errors) == len(results):
        raise errors[0]
    return [_failure(result) if isinstance(result, ImageError) else result for result in results]


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All of it, or the first error; then nothing of it goes on: its request is over, and its permit given back."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _prediction(answer: Answer, id: str, version: int) -> Prediction:
    """Without validation, which costs more than the rest of the conversion."""
    return Prediction.model_construct(
        id=id,
        label=answer.label,
        novel=answer.novel,
        score=answer.score,
        calibrated_score=answer.calibrated_score,
        p_novel=answer.p_novel,
        task=answer.task,
        nearest=[Nearest.model_construct(label=name, share=share) for name, share in answer.nearest],
        version=version,
    )


def _failure(error: ImageError) -> Failure:
    return Failure(error=ImageProblem(code=problem_of(error).code, detail=str(error)))


async def _answer(
    container: Container, served: ServableModel, image: ReceivedImage, client: str, deadline: float
) -> Prediction | ImageError:
    metrics = container.metrics
    try:
        if isinstance(image, ImageError):
            raise image
        pixels = await _decode(container, served, image)
    except ImageError as error:
        metrics.predicted("error", served.version, client)
        return error
    answer, embedding = await container.engine.submit(served, pixels, deadline)
    outcome = "novel" if answer.novel else "known"
    prediction = _prediction(answer, new_id(), served.version)
    metrics.predicted(outcome, served.version, client, answer.calibrated_score)
    sighting = Sighting(
        data=image,
        prediction_id=prediction.id,
        version=served.version,
        score=answer.score,
        calibrated_score=answer.calibrated_score,
        p_novel=answer.p_novel,
        nearest=answer.nearest,
        embedding=embedding,
        client=client,
        label=answer.label,
    )
    container.recent.put(sighting)
    if answer.novel and container.inbox_writer is not None:
        container.inbox_writer.offer(sighting)
    return prediction


async def _decode(container: Container, served: ServableModel, image: bytes) -> Array:
    started = time.monotonic()
    pixels = await asyncio.get_running_loop().run_in_executor(container.decoders, served.decode, image)
    container.metrics.stage_seconds.labels("decode").observe(time.monotonic() - started)
    return pixels
