"""`make docs`: the table of settings, from the settings themselves. A test holds that the file is up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from service.settings import ServiceSettings
from trainer.learning.settings import LearnerSettings
from trainer.worker.settings import WorkerSettings

TARGET = Path(__file__).with_name("settings.md")
PROGRAMS: dict[str, tuple[str, type[BaseSettings]]] = {
    "The server": ("`openworld serve`, and the server that `openworld up` starts.", ServiceSettings),
    "The worker": ("`openworld train`, and the trainer that `openworld up` starts.", WorkerSettings),
    "Learning": (
        "`openworld learn` and the worker. Those that change what is learned are recorded in every version.",
        LearnerSettings,
    ),
}
OTHERS = """\
## The command line

| variable | meaning |
| --- | --- |
| `OPENWORLD_DATA` | the data folder, where `--data` is not given |
| `OPENWORLD_URL` | the service that `teach`, `predict` and `demo` talk to (`http://127.0.0.1:8000`) |
| `OPENWORLD_KEY` | the key that they send |
| `OPENWORLD_REDIS_SERVER` | the Redis or Valkey server that `openworld up` starts, instead of the one in its wheel |
"""


def settings_page() -> str:
    """The whole of docs/settings.md."""
    parts = [
        "# Settings\n",
        "Every setting is an environment variable. An option of the command line, where there is one, goes before it. "
        "A wrong value stops the program at the start, with a message that names the variable.\n\n"
        "This page is made by `make docs` from the programs' own settings.\n",
    ]
    for title, (text, kind) in PROGRAMS.items():
        rows = [_row(name, field) for name, field in kind.model_fields.items()]
        parts.append(
            f"## {title}\n\n{text}\n\n| variable | default | meaning |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
        )
    return "\n".join([*parts, OTHERS])


def _row(name: str, field: FieldInfo) -> str:
    meaning = (field.description or name.replace("_", " ")).replace("|", "\\|")
    choices = get_args(field.annotation) if "Literal" in str(get_origin(field.annotation)) else ()
    if choices:
        meaning += f" ({', '.join(map(str, choices))})"
    return f"| `OPENWORLD_{name.upper()}` | {_default(field)} | {meaning} |"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "half the cores" if "decode" in (field.description or "") else "the cores there are"
    value: Any = field.default
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    TARGET.write_text(settings_page())
