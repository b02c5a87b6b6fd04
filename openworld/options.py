"""From the command line and the environment to settings, with errors that people can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from models.errors import OpenWorldError
from tasks.settings import Settings

S = TypeVar("S", bound=Settings)


def settings_from(kind: type[S], given: Mapping[str, Any], options: Mapping[str, str] | None = None) -> S:
    """Settings from `given`, without its Nones, and from the environment; `options` maps fields to their options.

    Raises OpenWorldError, which names each wrong setting but not its value: it may be a secret.
    """
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return kind(**given)
    except ValidationError as error:
        sources = kind.variables() | {name: option for name, option in (options or {}).items() if name in given}
        names = {variable: name for name, variable in kind.variables().items()}
        lines = []
        for problem in error.errors(include_input=False, include_url=False):
            message = problem["msg"].removeprefix("Value error, ")
            location = str(problem["loc"][0]) if problem["loc"] else ""
            source = sources.get(names.get(location, location))
            lines.append(f"{source}: {message[0].lower()}{message[1:]}" if source else message)
        raise OpenWorldError("\n".join(lines)) from error
