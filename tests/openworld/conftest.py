"""Data folders of the command line's tests: one task learned from coloured images."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openworld.cli import main
from tests.support.coloured_images import coloured_image, write_colours
from tests.support.images import write_classes

# Two names for images of one known class: the model cannot tell the three apart, so accuracy of `red` falls.
CONFUSED = {"crimson": range(50, 56), "scarlet": range(60, 66)}


@cache
def _batches(root: Path) -> SimpleNamespace:
    confused = {name: [coloured_image("red", n) for n in seeds] for name, seeds in CONFUSED.items()}
    return SimpleNamespace(
        first=write_colours(root / "first", "red", "green"),
        second=write_colours(root / "second", "blue", "white"),
        more_red=write_colours(root / "more", "red", images=range(100, 104)),
        confused=write_classes(root / "confused", confused),
    )


@cache
def _first_version(root: Path) -> Path:
    data = root / "data"
    assert main(["learn", str(_batches(root).first), "--data", str(data)]) == 0
    return data


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return _batches(tmp_path_factory.getbasetemp() / "coloured")


@pytest.fixture(scope="module")
def first(environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with one version, learned once per test process. Tests must not change it."""
    from tests.support.exported import export_once

    environment.setattr("trainer.context.export", export_once)  # the export takes longer than the training
    return _first_version(tmp_path_factory.getbasetemp() / "coloured")


@pytest.fixture
def data(first: Path, tmp_path: Path) -> Path:
    """A copy of `first` that a test may change."""
    return Path(shutil.copytree(first, tmp_path / "data"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command: (exit code, stdout, stderr)."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command
