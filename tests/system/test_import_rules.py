"""Dependencies point one way, and the server runs without torch."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

OURS = {"models", "tasks", "trainer", "service", "openworld"}
MAY_IMPORT = {
    "models": {"models"},
    "tasks": {"tasks", "models"},
    "trainer": {"trainer", "models", "tasks"},
    "service": {"service", "models", "tasks"},
    "openworld": OURS,
}
TORCH = {"torch", "torchvision", "timm"}
TORCH_MODULES = {
    "models.network.backbone",
    "models.network.adapted_blocks",
    "models.network.hat",
    "models.network.export",
    "models.network.weights",
}

IMPORT_WITHOUT_TORCH = """
import importlib, json, sys, traceback

blocked = set(json.loads(sys.argv[1]))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
failures = {}
for module in json.loads(sys.argv[2]):
    try:
        importlib.import_module(module)
    except Exception:
        failures[module] = traceback.format_exc()
print(json.dumps(failures))
"""


def modules(package: str) -> dict[str, Path]:
    """Every module of a package by its dotted name; empty while the package does not exist."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_roots(source: str, package: str) -> set[str]:
    """The top-level names that a source imports anywhere, also inside functions and type-checking blocks."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A relative import cannot leave its own top-level package.
            roots.add(package if node.level else (node.module or "").partition(".")[0])
    return roots


def violations(source: str, package: str) -> set[str]:
    """What a source of `package` imports and must not."""
    roots = imported_roots(source, package)
    forbidden = (roots & OURS) - MAY_IMPORT[package]
    if package == "service":
        forbidden |= roots & TORCH
    return forbidden


def failing_without_torch(names: list[str], cwd: Path = ROOT) -> dict[str, str]:
    """The modules that cannot be imported where torch is not installed, each with its traceback."""
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, json.dumps(sorted(TORCH)), json.dumps(names)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failures


@pytest.mark.parametrize("package", sorted(OURS))
def test_a_package_imports_only_what_it_may(package: str) -> None:
    found = {name: violations(path.read_text(), package) for name, path in modules(package).items()}
    assert not {name: sorted(bad) for name, bad in found.items() if bad}


def test_models_and_tasks_import_without_torch() -> None:
    names = [name for name in modules("models") | modules("tasks") if name not in TORCH_MODULES]
    assert "models" in names
    assert "tasks" in names
    failures = failing_without_torch(names)
    assert not failures, "\n".join(failures.values())


def test_the_service_imports_without_torch() -> None:
    names = [name for name in modules("service") if not name.endswith("__main__")]
    if not names:
        pytest.skip("the service does not exist yet")
    failures = failing_without_torch(names)
    assert not failures, "\n".join(failures.values())


@pytest.mark.parametrize(
    ("package", "source", "caught"),
    [
        ("models", "import tasks.queue", {"tasks"}),
        ("models", "def late():\n    from trainer.learn import learn", {"trainer"}),
        ("models", "import torch\nfrom . import errors\nfrom models.errors import ImageError", set()),
        ("tasks", "from models import images\nfrom service import app", {"service"}),
        ("trainer", "import models, tasks.store, openworld.cli", {"openworld"}),
        ("trainer", "from service.metrics import counter", {"service"}),
        ("service", "import timm.models\nfrom torch import nn", {"timm", "torch"}),
        ("service", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", {"torch"}),
        ("service", "from trainer import learn", {"trainer"}),
        ("openworld", "import models, tasks, trainer, service, torch", set()),
        ("models", "import modelsx\nimport tasks_of_others", set()),
    ],
)
def test_the_checker_catches_what_is_forbidden_and_nothing_else(package: str, source: str, caught: set[str]) -> None:
    assert violations(source, package) == caught


def test_the_checker_catches_a_module_that_needs_torch_at_import(tmp_path: Path) -> None:
    (tmp_path / "eager.py").write_text("import json\nfrom torch import nn\n")
    (tmp_path / "lazy.py").write_text("def late():\n    import torch\n")
    failures = failing_without_torch(["eager", "lazy"], cwd=tmp_path)
    assert set(failures) == {"eager"}
    assert "torch is blocked" in failures["eager"]
