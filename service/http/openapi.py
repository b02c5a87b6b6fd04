"""Additions to FastAPI's OpenAPI document: problem details, the key, and the schemas of images."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from service.http.problems import documented
from service.wire.predictions import Predictions
from service.wire.problems import Problem

BINARY = {"type": "string", "format": "binary"}
IMAGE_CONTENT: dict[str, Any] = {kind: {"schema": BINARY} for kind in ("image/jpeg", "image/png", "image/webp")}


def _complete(operation: dict[str, Any]) -> None:
    """Document the framework's own errors as problem details."""
    responses = operation["responses"]
    expected = [422] if "422" in responses else []
    expected += [400, 413, 415] if "requestBody" in operation else []
    for status, response in documented(*expected).items():
        if str(status) not in responses or "Problem" not in str(responses[str(status)]):
            responses[str(status)] = response


def complete_openapi(app: FastAPI, *, keys: bool) -> None:
    """Extend the document that `app.openapi` generates."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            components = document.setdefault("components", {})
            components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
            # FastAPI drops nulls from examples, also the `label` of a novel image.
            components["schemas"]["Predictions"]["examples"] = Predictions.model_json_schema()["examples"]
            for operations in document["paths"].values():
                for operation in operations.values():
                    _complete(operation)
            for unused in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(unused, None)
            if keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
        schema: dict[str, Any] = app.openapi_schema or {}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
