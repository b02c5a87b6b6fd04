"""The server image holds ONNX Runtime, not torch: the `serve` extra alone is enough to serve."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.paths import ROOT
from tests.support.servers import address_of, known_image, learned_folder, running_server
from tests.system.test_import_rules import IMPORT_WITHOUT_TORCH

BLOCK = IMPORT_WITHOUT_TORCH.partition("failures =")[0]
SERVE = """
import runpy
sys.argv = ["openworld", "serve", "--data", sys.argv[3]]
runpy.run_module("openworld", run_name="__main__")
"""


def test_it_serves_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    script = tmp_path / "blocked.py"
    script.write_text(BLOCK + SERVE)
    blocked = json.dumps(["torch", "torchvision", "timm"])
    check([sys.executable, str(script), blocked, "[]", str(data)], tmp_path)


@pytest.mark.timeout(900)
def test_it_serves_from_a_fresh_environment_with_the_serve_extra_alone(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # A copy, so that building the wheel leaves nothing in the project's folder.
    source = tmp_path / "source"
    packages = ("models", "tasks", "trainer", "service", "openworld")
    for package in packages:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{source}[serve]"]
    done = subprocess.run([python, *install], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True).stdout
    installed = {package["name"].lower() for package in json.loads(listed)}
    assert "onnxruntime-gpu" in installed or "onnxruntime" in installed
    assert not installed & {"torch", "torchvision", "timm"}
    data = learned_folder(tmp_path / "robot")
    check([str(tmp_path / "venv" / "bin" / "openworld"), "serve", "--data", str(data)], tmp_path)


def check(command: list[str], folder: Path) -> None:
    """It starts, answers as the server of the development environment does, and ends when told."""
    log = folder / "serve.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENWORLD_", "PYTHON"))}
    environment |= {"OPENWORLD_PORT": "0", "OPENWORLD_LOG_FORMAT": "json"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder)
    try:
        url = address_of(process, log)
        answer = httpx.post(f"{url}/predict", content=known_image("class 0"), timeout=30).json()["predictions"][0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    with running_server(folder / "robot", log=folder / "other.log") as server:
        assert server.post("/predict", content=known_image("class 0")).json()["predictions"][0] | {
            "id": ""
        } == answer | {"id": ""}
