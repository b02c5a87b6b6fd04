"""The folders of a really learned workload, and the mixed tasks of the learning benchmark."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.data import ImageSet
from benchmarks.scaling.learning import CLASSES, mixed
from benchmarks.serving import learned


def test_every_task_is_learned_from_its_folder_and_all_classes_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = ImageSet.made(2 * CLASSES + 1, 2, learned.ASKED)
    calls: list[tuple[dict[str, str], tuple[str, ...]]] = []

    def recorded(root: Path, settings: dict[str, str], *words: str) -> str:
        calls.append((settings, words))
        return ""

    monkeypatch.setattr(learned, "openworld", recorded)
    monkeypatch.setattr(ImageSet, "load", lambda path: images)
    given: list[Any] = ["--set", "made", "--out", tmp_path, "--tasks", 2, "--weights", "deit.safetensors"]
    assert learned.main([str(word) for word in given]) == 0
    assert [words for _, words in calls] == [
        ("learn", str(tmp_path / f"task {number}"), "--data", str(tmp_path / "data")) for number in (1, 2)
    ]
    assert calls[0][0]["OPENWORLD_BACKBONE_WEIGHTS"] == str(Path("deit.safetensors").resolve())
    classes = [own for number in (1, 2) for own in sorted((tmp_path / f"task {number}").iterdir())]
    assert len({own.name for own in classes}) == 2 * CLASSES
    assert {len(list(own.glob("*.jpg"))) for own in classes} == {2}
    asked = {file.read_bytes() for file in (tmp_path / "images").glob("*.jpg")}
    assert len(asked) == len(images.classes) * learned.ASKED
    assert not asked & {file.read_bytes() for own in classes for file in own.iterdir()}


def test_tasks_of_several_sets_are_mixed_evenly() -> None:
    large, small = (ImageSet.made(CLASSES * tasks, 1, 1) for tasks in (4, 2))
    large.classes[:] = [f"large {name}" for name in large.classes]
    kinds = [batch[0][0].split()[0] for batch, _ in mixed([large, small])]
    assert kinds == ["large", "made", "large", "large", "made", "large"]
