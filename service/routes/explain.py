"""POST /explain: the evidence behind an answer, task by task and class by class, for people who wonder why.

Far more to write down than an answer, and asked by people, not by robots: one at a time, in a thread of its own, so
that the engine and the event loop have theirs for /predict.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request

from models.errors import ImageError
from models.inference.answer import NOTHING_KNOWN, Answer, answer
from models.inference.evidence import Array, Evidence
from models.inference.model import Model
from models.inference.predictor import Predictor
from models.inference.rules import log_class_probabilities, log_coefficient
from service.container import Container, ContainerDep
from service.errors import DeadlinePassed
from service.http.auth import PredictKey
from service.http.image_bodies import read_images
from service.http.limits import finish_by
from service.http.problems import documented
from service.inference.servable import ServableModel
from service.wire.predictions import ClassEvidence, Explanation, TaskEvidence

router = APIRouter(tags=["people"])

_IMAGE = {"schema": {"type": "string", "format": "binary"}}
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "One image as it is",
        "content": {"image/jpeg": _IMAGE, "image/png": _IMAGE, "image/webp": _IMAGE},
    }
}


class Explainer:
    """One explanation at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def explain(self, container: Container, served: ServableModel, image: bytes) -> Explanation:
        seconds = container.settings.request_timeout
        try:
            async with asyncio.timeout(seconds):
                loop = asyncio.get_running_loop()
                pixels = await loop.run_in_executor(container.decoders, served.decode, image)
                await self._turn.acquire()
        except TimeoutError as error:
            raise DeadlinePassed(f"others are being explained, and this had to wait for {seconds:g} s") from error
        # From here on without a deadline: a thread cannot be stopped, and its place must not be given away before.
        try:
            return await asyncio.to_thread(explain, served, pixels)
        finally:
            self._turn.release()


@router.post(
    "/explain",
    summary="Why an image is answered as it is",
    responses=documented(400, 401, 403, 404, 409, 413, 415, 422, 429, 503, 504),
    openapi_extra=BODY,
)
async def explain_image(
    request: Request,
    container: ContainerDep,
    key: PredictKey,
    version: Annotated[int | None, Query(ge=1, le=10**12, description="ask this version")] = None,
) -> Explanation:
    """Counts as one image towards the key's rate, and is not kept: it is no prediction."""
    explainer: Explainer = request.app.state.explainer
    limits = replace(container.request_limits, images=1)
    deadline = limits.deadline(None)
    with container.admission.enter() as permit:
        (image,) = await finish_by(deadline, read_images(request, limits, permit))
        if isinstance(image, ImageError):
            raise image
        container.rate_limiter.take(key.name, 1)
        served = await finish_by(deadline, container.active_version.get(version))
        return await explainer.explain(container, served, image)


def explain(served: ServableModel, pixels: Array) -> Explanation:
    """The evidence on one decoded image; like `Predictor.score`, with nothing thrown away."""
    if not isinstance(served, Predictor) or not served.model.tasks:
        return _explanation(served.version, NOTHING_KNOWN, None, [])
    model = served.model
    evidence = model.evidence(served.runtime.features(model, pixels[None]))
    return _explanation(served.version, answer(model, evidence)[0], model, _tasks(model, evidence))


def _explanation(version: int, answered: Answer, model: Model | None, tasks: list[TaskEvidence]) -> Explanation:
    threshold = float(model.calibration.threshold[0]) if model else np.inf
    learned = model if model is not None and np.isfinite(threshold) else None
    return Explanation(
        version=version,
        label=answered.label,
        novel=answered.novel,
        score=answered.score,
        threshold=threshold if learned else None,
        calibrated_score=answered.calibrated_score,
        calibrated_threshold=float(learned.calibration.calibrated(np.array([threshold]))[0]) if learned else None,
        p_novel=answered.p_novel,
        rule=model.rule.name if model else None,
        constants=model.rule.constants if model else {},
        tasks=tasks,
    )


def _tasks(model: Model, evidence: Evidence) -> list[TaskEvidence]:
    scores, frozen = model.rule.log_scores(evidence)[0], evidence.frozen[0]
    known = model.calibration.p_known(evidence)[0]
    labels, first, out = model.labels, 0, []
    for k, task in enumerate(model.tasks):
        logits, distances = evidence.logits[k], evidence.distances[k]
        probabilities = np.exp(log_class_probabilities(logits, model.rule.constants))[0]
        classes = [
            ClassEvidence(
                name=name,
                label=labels[first + c],
                probability=float(probabilities[c]),
                distance=float(distances[0, c]),
                frozen_distance=float(frozen[first + c]),
                score=float(scores[first + c]),
            )
            for c, name in enumerate(task.classes)
        ]
        out.append(
            TaskEvidence(
                task=k,
                p_ood=float(max(0.0, 1.0 - probabilities.sum())),
                p_known=float(known[k]),
                coefficient=float(np.exp(log_coefficient(distances))[0, 0]),
                classes=classes,
            )
        )
        first += len(task.classes)
    return out
