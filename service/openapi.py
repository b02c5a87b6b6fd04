"""What FastAPI cannot know of the API: the shape of problems, and how to show a key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from service.problems import Problem
from service.schemas import Predictions


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
            if keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
        schema: dict[str, Any] = app.openapi_schema or {}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
