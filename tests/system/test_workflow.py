"""The GitHub workflow is valid and runs exactly what a developer runs."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml

from tests.support.paths import ROOT


def _workflow() -> dict[Any, Any]:
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    return workflow


def test_the_workflow_runs_the_tests_with_all_dependencies_the_accuracy_suite_and_the_images() -> None:
    steps = [step for job in _workflow()["jobs"].values() for step in job["steps"]]
    commands = [word for step in steps for word in re.findall(r"\bmake \w+", step.get("run", ""))]
    assert commands == ["make test", "make lowest", "make accuracy", "make images"]


def test_the_workflow_runs_on_pushes_and_pull_requests() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert {"push", "pull_request"} <= set(_workflow()[True])


def test_actions_are_pinned_to_a_major_version() -> None:
    steps = [step for job in _workflow()["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in actions)


def test_the_workflow_uses_the_oldest_python_that_is_supported() -> None:
    for job in _workflow()["jobs"].values():
        (setup,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@")]
        assert f'requires-python = ">={setup["with"]["python-version"]}"' in (ROOT / "pyproject.toml").read_text()


def test_every_dependency_has_a_lower_bound_that_the_lowest_job_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        if not requirement.startswith("openworld["):
            assert re.match(r"[A-Za-z0-9-]+>=\d+(\.\d+)*,<", requirement), requirement
