"""What FastAPI cannot know of the API: the shape of problems, and how to show a key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from service.http.problems import documented
from service.wire.predictions import Predictions
from service.wire.problems import Problem


def _complete(operation: dict[str, Any]) -> None:
    """What the framework refuses by itself is a problem like any other."""
    responses = operation["responses"]
    expected = [422] if "422" in responses else []
    expected += [400, 413] if "requestBody" in operation else []
    for status, response in documented(*expected).items():
        if str(status) not in responses or "Problem" not in str(responses[str(status)]):
            responses[str(status)] = response


def complete_openapi(app: FastAPI, *, keys: bool) -> None:
    """Add to the generated document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            components = document.setdefault("components", {})
            components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
            # FastAPI drops nulls, also from examples, where `label` of a novel image is one.
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
