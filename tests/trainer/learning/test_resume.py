"""A killed training resumes after its last finished epoch and ends with the same bytes."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from models.versions.store import VersionStore
from openworld.cli import main
from tests.support.exported import export_once
from tests.support.images import make_image, write_classes
from tests.support.paths import ROOT

pytest.importorskip("torch")

EPOCHS = 16
# Exporting graphs takes seconds and does not matter here.
COMMAND = """
import sys
import trainer.publish
from openworld.cli import main
from tests.support.exported import export_once

trainer.context.export = export_once
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module", autouse=True)
def quick_training(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENWORLD_TRAIN_EPOCHS", str(EPOCHS))
    environment.setattr("trainer.context.export", export_once)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    classes = {"noise": [make_image(n) for n in range(8)], "wide": [make_image(100 + n, (64, 16)) for n in range(8)]}
    return write_classes(tmp_path_factory.mktemp("batch"), classes)


@pytest.fixture(scope="module")
def second_batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    classes = {"tall": [make_image(200 + n, (16, 64)) for n in range(6)]}
    return write_classes(tmp_path_factory.mktemp("second"), classes)


@pytest.fixture(scope="module")
def learned(batch: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder that learned the batch without interruption. Do not change it."""
    data = tmp_path_factory.mktemp("uninterrupted")
    assert main(["learn", str(batch), "--data", str(data)]) == 0
    return data


@pytest.fixture(scope="module")
def uninterrupted(learned: Path) -> dict[str, str]:
    return learned_bytes(learned)


def learned_bytes(data: Path, version: int = 1) -> dict[str, str]:
    """The hashes of the version's contents, which are verified."""
    return {role: entry.sha256 for role, entry in VersionStore(data).load(version).manifest.files.items()}


def finished_epochs(data: Path, phase: str) -> int:
    """Finished epochs in the checkpoint of the phase; its file starts with a hash."""
    for path in (data / "work").glob(f"*/{phase}"):
        return int.from_bytes(path.read_bytes()[64:72], "little")
    return 0


def kill_in(phase: str, command: list[str], data: Path) -> None:
    """SIGKILL the command after the first finished epoch of the phase."""
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *command], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not finished_epochs(data, phase):
            assert process.poll() is None, "the training ended before it could be killed"
            assert time.monotonic() < end
            time.sleep(0.002)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_killed_training_ends_with_the_same_bytes(
    batch: Path, uninterrupted: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, phase = tmp_path / "data", "task 1"
    command = ["learn", str(batch), "--data", str(data)]
    kill_in(phase, command, data)
    assert 0 < finished_epochs(data, phase) < EPOCHS, "killed too late to test resuming"
    assert VersionStore(data).current() is None

    assert main(command) == 0
    assert learned_bytes(data) == uninterrupted
    # It resumed: finished epochs are not trained again.
    assert f"{phase}: epoch 1/" not in capsys.readouterr().err
    assert not any(path.is_dir() for path in (data / "work").iterdir())


def test_a_killed_second_task_ends_with_the_same_bytes(
    second_batch: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second task replays the memory and back-updates the first head."""
    folders = [Path(shutil.copytree(learned, tmp_path / name)) for name in ("uninterrupted", "killed")]
    # The images are noise: let the gate accept everything.
    commands = [
        ["learn", str(second_batch), "--data", str(data), "--gate-accuracy=1", "--gate-auc=1"] for data in folders
    ]
    assert main(commands[0]) == 0
    kill_in("task 2", commands[1], folders[1])
    assert 0 < finished_epochs(folders[1], "task 2") < EPOCHS, "killed too late to test resuming"
    assert VersionStore(folders[1]).current() == 1
    assert learned_bytes(folders[1]) == learned_bytes(learned)

    capsys.readouterr()
    assert main(commands[1]) == 0
    assert "task 2: epoch 1/" not in capsys.readouterr().err
    assert learned_bytes(folders[1], 2) == learned_bytes(folders[0], 2)
    before, after = (VersionStore(folders[1]).load(n).tensors["head.0.weight"] for n in (1, 2))
    assert not np.array_equal(before, after), "nothing was back-updated"


def test_an_interrupted_training_says_how_to_resume_and_resumes(
    batch: Path,
    uninterrupted: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["learn", str(batch), "--data", str(tmp_path)]

    def interrupt(display: object, event: object) -> None:
        if finished_epochs(tmp_path, "task 1") == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("openworld.progress.Display.__call__", interrupt)
        assert main(command) == 130
    assert "the same command continues from the last finished epoch" in capsys.readouterr().err
    assert finished_epochs(tmp_path, "task 1") == 3
    assert main(command) == 0
    assert learned_bytes(tmp_path) == uninterrupted


def test_a_checkpoint_of_other_settings_is_not_resumed(
    batch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(display: object, event: object) -> None:
        if finished_epochs(tmp_path, "task 1"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("openworld.progress.Display.__call__", interrupt)
        assert main(["learn", str(batch), "--data", str(tmp_path), "--seed", "7"]) == 130
    assert main(["learn", str(batch), "--data", str(tmp_path), "--seed", "8", "--epochs", "2"]) == 0
    assert "task 1: epoch 1/2" in capsys.readouterr().err
