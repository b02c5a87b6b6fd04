"""`POST /explain`: the evidence for an answer, per task and per class."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from models.errors import ImageError
from models.inference.answer import NOTHING_KNOWN, answer
from models.inference.evidence import Array, Evidence, log_coefficients, log_probabilities
from models.inference.model import Model
from models.inference.predictor import Predictor
from service.container import Container, ContainerDep
from service.http.auth import PredictKey
from service.http.image_bodies import read_images
from service.http.limits import finish_by
from service.http.openapi import IMAGE_CONTENT
from service.http.problems import documented
from service.inference.servable import ServableModel
from service.routes.predict import TimeoutHeader, VersionQuery
from service.wire.predictions import ClassEvidence, Explanation, TaskEvidence

router = APIRouter(tags=["people"])

REQUEST_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "description": "One image as it is", "content": IMAGE_CONTENT}
}


@router.post(
    "/explain",
    summary="Why an image is answered as it is",
    responses=documented(400, 401, 403, 404, 409, 413, 415, 422, 429, 503, 504),
    openapi_extra=REQUEST_BODY,
)
async def explain_image(
    request: Request,
    container: ContainerDep,
    key: PredictKey,
    version: VersionQuery = None,
    timeout: TimeoutHeader = None,
) -> Explanation:
    """Counts as one image towards the key's rate. It is not a prediction: it is not counted as one and not kept."""
    limits = replace(container.request_limits, images=1)
    deadline = limits.deadline(timeout)
    await container.rate_limiter.admit(key.name, 1)
    with container.admission.enter(key.name) as permit:
        (image,) = await finish_by(deadline, read_images(request, limits, permit))
        if isinstance(image, ImageError):
            raise image
        model = await finish_by(deadline, container.active_version.get(version))
        return await explain_in_turn(container, key.name, model, image, deadline)


async def explain_in_turn(
    container: Container, client: str, model: ServableModel, image: bytes, deadline: float
) -> Explanation:
    """One explanation at a time: it takes longer than an answer, and must leave the other threads to /predict."""
    pixels = await finish_by(deadline, container.engine.decode(client, model, image))
    await finish_by(deadline, container.explain_turn.acquire())
    # From here on without a deadline: a thread cannot be stopped, and the next one must wait for it.
    try:
        return await asyncio.get_running_loop().run_in_executor(container.explain_thread, explain, model, pixels)
    finally:
        container.explain_turn.release()


def explain(predictor: ServableModel, pixels: Array) -> Explanation:
    """The answer to one decoded image, with all evidence."""
    answered, tasks = NOTHING_KNOWN, list[TaskEvidence]()
    fitted: dict[str, Any] = {"rule": None, "weights": {}, "threshold": None, "calibrated_threshold": None}
    fitted["novel_above"] = None
    if isinstance(predictor, Predictor) and predictor.model.classes:
        model = predictor.model
        evidence = model.evidence(predictor.runtime.features(model, pixels[None]))
        answered, tasks = answer(model, evidence)[0], _tasks(model, evidence)
        fitted |= {"rule": model.rule.name, "weights": dict(model.rule.weights)}
        fitted["novel_above"] = model.novelty.novel_above
        threshold = model.novelty.threshold
        if np.isfinite(threshold[0]):
            calibrated = model.novelty.calibrated(threshold)
            fitted |= {"threshold": float(threshold[0]), "calibrated_threshold": float(calibrated[0])}
    return Explanation(version=predictor.version, **vars(answered), **fitted, tasks=tasks)


def _tasks(model: Model, evidence: Evidence) -> list[TaskEvidence]:
    scores, frozen = model.rule.log_scores(evidence)[0], evidence.frozen
    labels, distances, refined = model.labels, evidence.class_distances[0], evidence.refined
    all_probabilities = np.exp(log_probabilities(evidence, model.rule.scales))[0]
    coefficients = np.exp(log_coefficients(evidence))[0]
    first, out = 0, []
    for k, names in enumerate(model.classes_by_task):
        probabilities = all_probabilities[first : first + len(names)]
        classes = [
            ClassEvidence(
                name=name,
                label=labels[first + c],
                probability=float(probabilities[c]),
                distance=float(distances[first + c]),
                frozen_distance=float(frozen.distances[0, first + c]),
                frozen_cosine=float(frozen.cosines[0, first + c]),
                output_cosine=float(frozen.output_cosines[0, first + c]),
                ridge=float(frozen.ridge[0, first + c]),
                refined_cosine=None if refined is None else float(refined.cosines[0, first + c]),
                score=float(scores[first + c]),
            )
            for c, name in enumerate(names)
        ]
        out.append(
            TaskEvidence(
                task=k,
                ran=evidence.ran is None or bool(evidence.ran[0, k]),
                p_ood=float(max(0.0, 1.0 - probabilities.sum())),
                coefficient=float(coefficients[k]),
                classes=classes,
            )
        )
        first += len(names)
    return out
