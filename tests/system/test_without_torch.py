"""Everything but `models.network` and `trainer` works without torch; the `serve` extra alone is enough to serve.

The static side of this rule is an import-linter contract in pyproject.toml.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.fresh_venv import clean_environment, install
from tests.support.paths import ROOT
from tests.support.servers import address_of, known_image, learned_folder, running_server

TORCH = ("torch", "torchvision", "timm")
BLOCK_TORCH = f"""
import importlib, json, sys, traceback

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {TORCH}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""
IMPORT_ALL = """
failures = {}
for module in json.loads(sys.argv[1]):
    try:
        importlib.import_module(module)
    except Exception:
        failures[module] = traceback.format_exc()
print(json.dumps(failures))
"""
SERVE = """
import runpy
sys.argv = ["openworld", "serve", "--data", sys.argv[1]]
runpy.run_module("openworld", run_name="__main__")
"""


def modules(package: str) -> list[str]:
    """The dotted names of a package's modules, except `__main__`."""
    names = [path.relative_to(ROOT).with_suffix("").parts for path in sorted((ROOT / package).rglob("*.py"))]
    dotted = [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]
    return [name for name in dotted if not name.endswith("__main__")]


@pytest.mark.parametrize("package", ["models", "tasks", "service"])
def test_modules_import_where_torch_is_missing(package: str) -> None:
    names = [name for name in modules(package) if not name.startswith("models.network.")]
    assert package in names
    command = [sys.executable, "-c", BLOCK_TORCH + IMPORT_ALL, json.dumps(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    failures = json.loads(done.stdout.splitlines()[-1])
    assert not failures, "\n".join(failures.values())


def test_the_server_runs_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    script = tmp_path / "blocked.py"
    script.write_text(BLOCK_TORCH + SERVE)
    check([sys.executable, str(script), str(data)], tmp_path)


@pytest.mark.timeout(900)
def test_the_serve_extra_alone_is_enough_to_serve(tmp_path: Path) -> None:
    bin_folder, installed = install(tmp_path, "serve")
    assert "onnxruntime-gpu" in installed or "onnxruntime" in installed
    assert not installed & set(TORCH)
    data = learned_folder(tmp_path / "robot")
    check([str(bin_folder / "openworld"), "serve", "--data", str(data)], tmp_path)


def check(command: list[str], folder: Path) -> None:
    """Start the server, and compare its answer with that of the development environment's server."""
    log = folder / "serve.log"
    environment = clean_environment() | {"OPENWORLD_PORT": "0", "OPENWORLD_LOG_FORMAT": "json"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder)
    try:
        url = address_of(process, log)
        answer = httpx.post(f"{url}/predict", content=known_image("class 0"), timeout=30).json()["predictions"][0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    with running_server(folder / "robot", log=folder / "other.log", fresh=True) as server:
        assert server.post("/predict", content=known_image("class 0")).json()["predictions"][0] | {
            "id": ""
        } == answer | {"id": ""}
