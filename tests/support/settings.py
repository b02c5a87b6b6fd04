"""Settings by their field names, for processes and for constructors."""

from __future__ import annotations

import os
from typing import Any

from openworld.environment import SETTINGS
from trainer.learning.settings import LearnerSettings, Recipe


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of openworld."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OPENWORLD_")}


def variables(**settings: object) -> dict[str, str]:
    """Environment variables of all programs' settings with these field names."""
    out: dict[str, str] = {}
    for name, value in settings.items():
        found = {kind.variables()[name] for kind in SETTINGS if name in kind.variables()}
        assert found, f"no setting has the name {name}"
        out |= dict.fromkeys(found, str(value))
    return out


def learner_settings(**settings: Any) -> LearnerSettings:
    """LearnerSettings from its fields and those of its recipe."""
    recipe = {name: settings.pop(name) for name in list(settings) if name in Recipe.model_fields}
    return LearnerSettings(**settings, recipe=Recipe(**recipe))
