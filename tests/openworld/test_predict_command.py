"""`openworld predict` from a data folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("environment")

Run = Any


def test_an_unreadable_file_does_not_affect_the_others(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    good = batches.first / "red" / "0.jpg"
    given = [good, tmp_path / "notes.txt", tmp_path / "nothing.jpg", tmp_path / "empty"]
    code, out, _ = run("predict", *given, "--data", first, "--json")
    assert code == 1
    answers = [json.loads(line) for line in out.splitlines()]
    assert [Path(answer["file"]) for answer in answers] == given
    assert ["error" in answer for answer in answers] == [False, True, True, True]
    code, out, _ = run("predict", *given, "--data", first)
    assert code == 1
    assert "No such file" in out


def test_a_file_name_is_never_interpreted_as_markup(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "[bold]a[red].jpg"
    shutil.copy(batches.first / "red" / "0.jpg", path)
    code, out, _ = run("predict", path, "--data", first)
    assert code == 0
    assert "[bold]a[red].jpg" in out


def test_a_missing_version_is_refused(first: Path, batches: SimpleNamespace, run: Run) -> None:
    code, _, err = run("predict", batches.first, "--data", first, "--version", "9")
    assert code == 2
    assert "there is no version 9" in err


def test_commands_on_an_empty_folder_say_how_to_start(tmp_path: Path, run: Run) -> None:
    code, out, _ = run("versions", "--data", tmp_path / "data")
    assert code == 0
    assert "openworld learn FOLDER --data" in out
    code, _, err = run("predict", "x.jpg", "--data", tmp_path / "data")
    assert code == 2
    assert "openworld learn FOLDER --data" in err
    assert not (tmp_path / "data").exists()


def test_help_predict_and_versions_need_no_torch(first: Path, batches: SimpleNamespace) -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["timm"] = None
from openworld.cli import main
data, image = sys.argv[1:]
assert main(["versions", "--data", data]) == 0
assert main(["predict", image, "--data", data]) == 0
main(["--help"])
"""
    command = [sys.executable, "-c", program, str(first), str(batches.first / "red" / "0.jpg")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "first steps" in done.stdout
