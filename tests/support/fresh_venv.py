"""The project, installed with one extra into a new virtual environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ("models", "tasks", "trainer", "service", "openworld")


def install(folder: Path, extra: str) -> tuple[Path, set[str]]:
    """Return the environment's `bin` folder, and the lower-case names of all installed distributions."""
    # Neither a pip of its own nor bytecode of modules that no test imports: both take seconds.
    venv.create(folder / "venv")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv")]
    # Build from a copy: building a wheel writes into the source folder.
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    command = [*pip, "install", "--no-compile", "--quiet", "--disable-pip-version-check", f"{source}[{extra}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True).stdout
    return folder / "venv" / "bin", {package["name"].lower() for package in json.loads(listed)}


def clean_environment() -> dict[str, str]:
    """The environment variables of this process, without those that change openworld or Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OPENWORLD_", "PYTHON"))}
