"""From the command line and the environment to settings, with errors that people can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from models.errors import OpenWorldError

S = TypeVar("S", bound=BaseSettings)


def settings_from(kind: type[S], given: Mapping[str, Any]) -> S:
    """What was given goes before the environment; what is None was not given."""
    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise OpenWorldError(_readable(error)) from error


def _readable(error: ValidationError) -> str:
    """Each wrong setting by its name, without the value: it may be a secret."""
    lines = []
    for one in error.errors(include_input=False, include_url=False):
        name = "_".join(map(str, one["loc"])).upper()
        lines.append(f"OPENWORLD_{name}: {one['msg']}" if name else one["msg"].removeprefix("Value error, "))
    return "\n".join(lines)
