"""What FastAPI cannot know of the API: the shape of problems, and how to show a key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from service.problems import Problem


def complete_openapi(app: FastAPI, *, keys: bool) -> None:
    """Add to the generated document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            components = document.setdefault("components", {})
            components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
            if keys:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
        schema: dict[str, Any] = app.openapi_schema or {}
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
