"""JSON bodies that a route reads by itself: one error for all that can be wrong with them."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from service.errors import BadRequest

M = TypeVar("M", bound=BaseModel)


def parse(kind: type[M], body: bytes, example: str) -> M:
    """Bound the number of entries first: pydantic reports every wrong one, at a hundred times its size."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(f"the JSON cannot be read ({where}: {first['msg']}): send {example}") from error
