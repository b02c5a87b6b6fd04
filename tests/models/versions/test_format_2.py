"""Migration of a folder that an earlier release wrote: `format-2.zip` holds its versions, and the answers that it gave.

Versions 1 to 3 are those of `learned_folder`, version 4 renames "class 1", a task was rejected, and version 2 was
current for a while after version 4.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from models.errors import FormatError
from models.files import sha256_bytes
from models.inference.predictor import Predictor
from models.inference.stored_model import read_model
from models.versions import format_2
from models.versions.data_format import FORMAT, open_data_folder
from models.versions.edits import Edit, publish_edit
from models.versions.store import VersionStore
from tests.support.servers import known_image, novel_image
from tests.support.version_stores import flip_byte, tree

ARCHIVE = Path(__file__).with_name("format-2.zip")
IMAGES = [*(known_image(f"class {c}", 100) for c in range(5)), *(novel_image(n) for n in range(3))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path / "robot")
    (tmp_path / "robot" / "answers.json").rename(tmp_path / "answers.json")
    return tmp_path / "robot"


def answers(folder: Path, version: int) -> list[Any]:
    found = Predictor.open(folder, version, "cpu", 1).predict(IMAGES)
    return [[one.label, one.novel, one.score] for one in found if not isinstance(one, Exception)]


def test_migrated_versions_give_the_answers_of_the_earlier_release(folder: Path) -> None:
    with pytest.raises(FormatError, match=r"has format 2, .* to migrate it"):
        VersionStore(folder)
    open_data_folder(folder)
    store = VersionStore(folder)
    assert (folder / "FORMAT").read_text() == f"{FORMAT}\n"
    assert (store.current(), store.versions(), store.lineage()) == (4, [1, 2, 3, 4], [4, 3, 2, 1])
    assert [entry.version for entry in store.log()] == [1, 2, 3, 4, 2, 4]
    expected = json.loads((folder.parent / "answers.json").read_text())
    for version, wanted in expected.items():
        got = answers(folder, int(version))
        assert [one[:2] for one in got] == [one[:2] for one in wanted]
        assert [one[2] for one in got] == pytest.approx([one[2] for one in wanted], abs=1e-4)
    assert not (folder / "promotions.jsonl").exists()
    assert sorted(path.name for path in (folder / "versions").iterdir()) == [f"00000{n}.json" for n in (1, 2, 3, 4)]
    assert [path.name for path in (folder / "rejected").iterdir()] == ["bad.json"]


def test_each_task_is_stored_once(folder: Path) -> None:
    open_data_folder(folder)
    store = VersionStore(folder)
    contents = [store.manifest(n).files for n in store.versions()]
    assert contents[2] == contents[3]  # an edit
    assert len({files["task.0"] for files in contents}) == 1
    assert len(list((folder / "tasks").iterdir())) == 3 + 3  # tasks, and the base of each version that learned


def test_a_migrated_version_can_be_edited_and_holds_the_adapters_that_training_continues_with(folder: Path) -> None:
    open_data_folder(folder)
    store = VersionStore(folder)
    publish_edit(store, Edit("rename", "class 0", "apple"), "operator", "a test")
    model, _ = read_model(store.load())
    assert model.base is not None
    assert model.shared.bottleneck > 0
    assert model.shared is model.base.shared


def test_the_former_files_are_kept(folder: Path) -> None:
    before = tree(folder)
    open_data_folder(folder)
    assert tree(folder / "format-2") == before


@pytest.mark.parametrize("step", range(0, 24, 2))
def test_a_migration_that_was_killed_is_completed(folder: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = folder.with_name("whole")
    shutil.copytree(folder, whole)
    open_data_folder(whole)
    count = 0

    def killed_at(kind: type, name: str) -> Any:
        real = getattr(kind, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count > step:
                raise KeyboardInterrupt
            return real(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(format_2.LocalFiles, "put_if_absent", killed_at(format_2.LocalFiles, "put_if_absent"))
        patch.setattr(format_2, "discard", killed_at(format_2, "discard"))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            open_data_folder(folder)
    open_data_folder(folder)
    assert tree(folder) == tree(whole)


def test_a_damaged_version_is_left_out_and_the_others_are_migrated(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip_byte(folder / "versions" / "000003" / "model.safetensors")
    damaged = sha256_bytes((folder / "versions" / "000003" / "model.safetensors").read_bytes())
    open_data_folder(folder)
    store = VersionStore(folder)
    assert store.versions() == [1, 2, 4]
    assert store.lineage() == [4, 3, 2, 1]  # by the log
    assert "is damaged and was left out" in caplog.text
    kept = folder / "format-2" / "versions" / "000003" / "model.safetensors"
    assert sha256_bytes(kept.read_bytes()) == damaged
