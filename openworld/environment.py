"""The environment variables that openworld reads, the check that refuses all others, and settings from both.

A variable with a wrong name would be ignored silently: `OPENWORLD_KEY5=...` would start a server without keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from models.errors import OpenWorldError
from service.settings import ServiceSettings
from tasks.settings import Settings
from trainer.learning.settings import LearnerSettings
from trainer.worker.settings import WorkerSettings

S = TypeVar("S", bound=Settings)

PREFIX = "OPENWORLD_"
URL, KEY, REDIS_SERVER = "OPENWORLD_URL", "OPENWORLD_KEY", "OPENWORLD_UP_REDIS_SERVER"
COMMAND_LINE = {
    URL: "the service that `teach`, `predict`, `versions` and `demo` use; default `http://127.0.0.1:8000`",
    KEY: "the API key that they send",
    REDIS_SERVER: "path of the Redis or Valkey server that `openworld up` starts, instead of the one in its wheel",
}
SETTINGS = (ServiceSettings, WorkerSettings, LearnerSettings)
KNOWN = frozenset(COMMAND_LINE).union(*(kind.variables().values() for kind in SETTINGS))

# Former name -> present name, both without the prefix; a name that only got a group prefix is found without an entry.
RENAMED = {
    "THREADS": "SERVE_THREADS (server) or OPENWORLD_TRAIN_THREADS (trainer)",
    "LANES": "SERVE_PARALLEL_BATCHES",
    "MAX_BATCH": "SERVE_BATCH_SIZE",
    "QUEUE_LIMIT": "SERVE_IMAGES_IN_FLIGHT",
    "MEMORY_LIMIT": "SERVE_BODY_MEMORY",
    "MAX_BODY": "SERVE_MAX_BODY_BYTES",
    "MAX_IMAGES": "SERVE_MAX_REQUEST_IMAGES",
    "MAX_PIXELS": "SERVE_MAX_IMAGE_PIXELS",
    "TRAINER_NICE": "TRAIN_NICE",
    "TRAINER_HOST": "TRAIN_METRICS_HOST",
    "TRAINER_PORT": "TRAIN_METRICS_PORT",
    "MEMORY": "TRAIN_REPLAY_SIZE",
    "BATCH": "TRAIN_BATCH_SIZE",
    "REDIS_SERVER": "UP_REDIS_SERVER",
}
RECIPE = """
    GROW_WHEN_USED MIN_STEPS MOMENTUM WEIGHT_DECAY SPARSITY REPLAY BACK_UPDATE BACK_LEARNING_RATE BACK_BATCH BACK_DRAWN
    HOLD_OUT
"""
LEFT_OUT = "every image that OPENWORLD_TRAIN_KEEP_PER_CLASS keeps is left out in turn"
DROPPED = {
    "PINNED_VERSIONS": "the server keeps 2 pinned versions",
    **dict.fromkeys(("TRAIN_FOLDS", "TRAIN_HOLD_OUT_FROM", "FOLDS", "HOLD_OUT_FROM"), LEFT_OUT),
    "DRIFT_MINIMUM": "it is a tenth of OPENWORLD_SERVE_DRIFT_WINDOW",
    **dict.fromkeys(RECIPE.split(), "it is part of `trainer.learning.settings.Recipe`"),
}


def check_environment(names: Iterable[str]) -> None:
    """Raise OpenWorldError if one of `names` looks like a setting and is none. Values are not read."""
    names = {name.upper() for name in names}
    wrong = sorted(name for name in names - KNOWN - _service_links(names) if _looks_like_a_setting(name))
    if wrong:
        lines = "\n".join(f"  - {name} {_remedy(name)}" for name in wrong)
        raise OpenWorldError(f"not settings of openworld, see docs/settings.md:\n{lines}")


def _looks_like_a_setting(name: str) -> bool:
    """Tolerates a typing error in the prefix."""
    return SequenceMatcher(None, name[: len(PREFIX)], PREFIX).ratio() > 0.85


def _remedy(name: str) -> str:
    old = name.removeprefix(PREFIX)
    if old in RENAMED:
        return f"is now {PREFIX}{RENAMED[old]}"
    for group in ("SERVE_", "TRAIN_"):
        if f"{PREFIX}{group}{old}" in KNOWN:
            return f"is now {PREFIX}{group}{old}"
    if old in DROPPED:
        return f"is no longer a setting: unset it ({DROPPED[old]})"
    shared = PREFIX + old.partition("_")[2]  # OPENWORLD_SERVE_KEYS: shared settings have no group
    near = [shared] if shared in KNOWN else get_close_matches(name, sorted(KNOWN), n=2, cutoff=0.86)
    return f"is unknown: did you mean {' or '.join(near)}?" if near else "is unknown: unset it"


def _service_links(names: Collection[str]) -> set[str]:
    """Variables that Kubernetes sets for a Service whose name begins with `openworld`."""
    services = [name.removesuffix("_SERVICE_HOST") for name in names if name.endswith("_SERVICE_HOST")]
    return {name for name in names if any(name.startswith((f"{s}_SERVICE_", f"{s}_PORT")) for s in services)}


def settings_from(kind: type[S], given: Mapping[str, Any], options: Mapping[str, str] | None = None) -> S:
    """Settings from `given` (None: not given) and from the environment; `options` names the options of fields.

    OpenWorldError names every wrong setting by its option or variable, without its value, which may be a secret.
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
