"""Checkpoints: only what belongs to the same batch, parent and settings is resumed."""

from pathlib import Path

import numpy as np
import pytest

from models.storage import LocalFiles
from tests.support.object_stores import memory_storage
from trainer.learning.checkpoint import Checkpoint

STATE = {"weights": np.arange(3.0)}


@pytest.mark.parametrize("open_folder", [LocalFiles, memory_storage])
def test_an_epoch_is_resumed_with_the_same_fingerprint_only(tmp_path: Path, open_folder: type[LocalFiles]) -> None:
    storage = open_folder(tmp_path)
    Checkpoint(storage, "task", {"parent": 1}).save("train", 3, STATE)
    epoch, tensors = Checkpoint(storage, "task", {"parent": 1}).load("train")
    assert (epoch, tensors["weights"].tolist()) == (3, [0.0, 1.0, 2.0])
    assert Checkpoint(storage, "task", {"parent": 2}).load("train") == (0, {})


def test_an_epoch_of_a_stopped_trainer_is_not_resumed_under_another_fingerprint(tmp_path: Path) -> None:
    storage = memory_storage(tmp_path)
    stopped = Checkpoint(storage, "task", {"parent": 1})
    Checkpoint(storage, "task", {"parent": 2})
    stopped.save("train", 3, STATE)
    assert Checkpoint(storage, "task", {"parent": 2}).load("train") == (0, {})
