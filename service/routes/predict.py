"""`POST /predict`: read the body, check the limits, pick the model, run the engine, record, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from models.errors import ImageError
from models.inference.answer import Answer
from service.container import Container, ContainerDep, get_container
from service.http.auth import PredictKey, require_predict_key
from service.http.image_bodies import ReceivedImage, read_images
from service.http.limits import finish_by, finish_while_connected
from service.http.middleware import new_id
from service.http.openapi import BINARY, IMAGE_CONTENT
from service.http.problems import documented, problem_of
from service.inference.servable import ServableModel
from service.wire.predictions import Base64Images, Failure, ImageProblem, Nearest, Prediction, Predictions

router = APIRouter(tags=["robots"])

VersionQuery = Annotated[int | None, Query(ge=1, le=10**12, description="answer with this version")]
TimeoutHeader = Annotated[
    float | None,
    Header(
        alias="X-Request-Timeout",
        gt=0,
        le=10**6,
        allow_inf_nan=False,
        description="seconds until the deadline; reduced to the longest deadline of the server, 60 by default",
    ),
]

FORM = {
    "type": "object",
    "required": ["images"],
    "properties": {"images": {"type": "array", "minItems": 1, "items": BINARY}},
}
REQUEST_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One image as it is (fastest), a form with one or more `images`, or base64 in JSON",
        "content": {
            **IMAGE_CONTENT,
            "multipart/form-data": {"schema": FORM},
            "application/json": {"schema": Base64Images.model_json_schema()},
        },
    }
}


@router.post(
    "/predict",
    response_model=Predictions,
    summary="Name images, or say that they are novel",
    responses=documented(400, 401, 403, 404, 409, 413, 415, 422, 429, 503, 504),
    openapi_extra=REQUEST_BODY,
)
async def predict(
    request: Request,
    container: ContainerDep,
    key: PredictKey,
    version: VersionQuery = None,
    timeout: TimeoutHeader = None,
) -> Response:
    """One entry per image, in order. An image that cannot be read fails alone; if none can, the request fails."""
    started = time.monotonic()
    deadline = container.request_limits.deadline(timeout)
    await container.rate_limiter.admit(key.name, 1)  # before the body is read; it has at least one image
    with container.admission.enter(key.name) as permit:
        images = await finish_by(deadline, read_images(request, container.request_limits, permit))
        container.metrics.stages["read"].observe(time.monotonic() - started)
        await container.rate_limiter.admit(key.name, len(images), paid=1)
        model = await finish_by(deadline, container.active_version.get(version))
        work = _predict_all(container, model, images, key.name, deadline)
        predictions = await finish_while_connected(request, deadline, work)
    request.scope["log_fields"].update(images=len(images), version=model.version)
    body = Predictions.model_construct(predictions=predictions).model_dump_json()
    return Response(body, media_type="application/json")


async def _predict_all(
    container: Container, model: ServableModel, images: Sequence[ReceivedImage], client: str, deadline: float
) -> list[Prediction | Failure]:
    if len(images) == 1:
        results = [await _predict(container, model, images[0], client, deadline)]
    else:
        try:
            async with asyncio.TaskGroup() as group:  # cancels all images if one fails with more than an ImageError
                tasks = [group.create_task(_predict(container, model, one, client, deadline)) for one in images]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        results = [task.result() for task in tasks]
    failed = [result for result in results if isinstance(result, ImageError)]
    if len(failed) == len(results):
        raise failed[0]
    return [_failure(result) if isinstance(result, ImageError) else result for result in results]


async def _predict(
    container: Container, model: ServableModel, image: ReceivedImage, client: str, deadline: float
) -> Prediction | ImageError:
    try:
        if isinstance(image, ImageError):
            raise image
        pixels = await container.engine.decode(client, model, image)
    except ImageError as error:
        container.recorder.record_unreadable(model.version, client)
        return error
    scored = await container.engine.submit(client, model, pixels, deadline)
    prediction_id = new_id()
    container.recorder.record(image, scored, prediction_id, model.version, client)
    return _prediction(scored.answer, prediction_id, model.version)


def _prediction(answer: Answer, id: str, version: int) -> Prediction:
    # Without validation, which takes longer than the rest of the conversion.
    nearest = [Nearest.model_construct(label=name, share=share) for name, share in answer.nearest]
    return Prediction.model_construct(**{**vars(answer), "id": id, "nearest": nearest, "version": version})


def _failure(error: ImageError) -> Failure:
    return Failure(error=ImageProblem(code=problem_of(error).code, detail=str(error)))


class FastPredictRoute(Route):
    """POST /predict without a query and without X-Request-Timeout, which is nearly all of the traffic.

    Such a request has no parameters to validate, so it skips FastAPI's dependency injection and response validation,
    which take a good part of a millisecond. All other requests go to the route above, which is also the documented one.
    """

    def __init__(self) -> None:
        super().__init__("/predict", _predict_without_parameters, methods=["POST"])

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.FULL or scope["query_string"]:
            return Match.NONE, {}
        if any(name == b"x-request-timeout" for name, _ in scope["headers"]):
            return Match.NONE, {}
        return match, {**child, "route": self}


async def _predict_without_parameters(request: Request) -> Response:
    return await predict(request, await get_container(request), await require_predict_key(request))
