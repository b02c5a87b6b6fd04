"""`make docs`: write docs/settings.md from the settings classes. A test compares the file with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from openworld.environment import COMMAND_LINE, SETTINGS

TARGET = Path(__file__).with_name("settings.md")
GROUPS = {
    "OPENWORLD_SERVE_": ("Server", "Read by `openworld serve`, and by the server that `openworld up` starts."),
    "OPENWORLD_TRAIN_": (
        "Training",
        "Read by `openworld train` and `openworld learn`, and by the trainer that `openworld up` starts. Those that "
        "change what is learned are recorded in every version.",
    ),
    "OPENWORLD_UP_": ("Supervisor", "Read by `openworld up`."),
    "OPENWORLD_": ("Shared", "Read by several commands."),
}
INTRODUCTION = """\
# Settings

Every setting is an environment variable. A command-line option takes precedence over its variable. An empty variable
counts as unset.

- **A wrong value or an unknown `OPENWORLD_*` name stops every command at the start**, with a message that names the
  variable and the right name. Values are never printed.
- In Kubernetes a Service named `openworld` sets `OPENWORLD_PORT` in every pod: set `enableServiceLinks: false`.

`make docs` writes this page from the settings classes.
"""


def settings_page() -> str:
    """The whole of docs/settings.md."""
    rows: dict[str, str] = {}
    for kind in SETTINGS:
        rows |= {variable: _row(variable, kind.model_fields[name]) for name, variable in kind.variables().items()}
    rows |= {variable: f"| `{variable}` | none | {meaning} |" for variable, meaning in COMMAND_LINE.items()}
    tables: dict[str, list[str]] = {group: [] for group in sorted(GROUPS)}
    for variable, row in rows.items():
        tables[next(group for group in GROUPS if variable.startswith(group))].append(row)
    return "\n".join([INTRODUCTION, *(_table(*GROUPS[group], rows) for group, rows in tables.items())])


def _table(title: str, text: str, rows: list[str]) -> str:
    return "\n".join([f"## {title}\n\n{text}\n", "| variable | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _row(variable: str, field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|")
    if get_origin(field.annotation) is Literal:
        meaning += f" ({', '.join(get_args(field.annotation))})"
    return f"| `{variable}` | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "half the cores" if "decode" in (field.description or "") else "the number of cores"
    value: Any = field.default
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    TARGET.write_text(settings_page())
