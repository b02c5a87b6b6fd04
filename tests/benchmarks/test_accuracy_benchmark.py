"""The accuracy benchmark: streams, a complete run on generated images, and resuming it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.images import make_image

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.cells import Runner, Setup, time_left
from benchmarks.accuracy.data import ImageSet
from benchmarks.accuracy.prior import training_stream
from benchmarks.accuracy.streams import Cell, Stream, cells


def write_image_set(path: Path, per_class: dict[str, int], classes: int) -> Path:
    """Write an image set in the benchmark's format."""
    tensors: dict[str, NDArray[Any]] = {}
    for split, count in per_class.items():
        labels = np.repeat(np.arange(classes), count)
        images = [make_image(1000 * len(split) + i, (24 + 8 * int(label), 24)) for i, label in enumerate(labels)]
        tensors[f"{split}.bytes"] = np.frombuffer(b"".join(images), np.uint8)
        tensors[f"{split}.offsets"] = np.cumsum([0, *map(len, images)])
        tensors[f"{split}.labels"] = labels
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"classes": json.dumps([f"class {c}" for c in range(classes)])})
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small image set of noise under the name that suite `short` reads."""
    folder = tmp_path_factory.mktemp("data")
    write_image_set(folder / "caltech.safetensors", {"train": 4, "test": 2}, 17)
    return folder


def test_a_stream_leaves_classes_unknown_and_chooses_images_by_the_seed(data: Path) -> None:
    images = ImageSet.load(data / "caltech.safetensors")
    stream = Stream.make(images, tasks=3, classes=5, per_class=3, seed=1)
    assert [len(task) for task in stream.tasks] == [5, 5, 5]
    assert len(set(stream.classes)) == 15
    assert all(len(keys) == 3 for task in stream.tasks for keys in task.values())
    assert len(stream.test_keys) == len(stream.labels) == 34
    assert (stream.labels == -1).sum() == 4
    for key, label in zip(stream.test_keys, stream.labels.tolist(), strict=True):
        split, index = key.split("/")
        assert split == "test"
        name = images.classes[images.tensors["test.labels"][int(index)]]
        assert label == (stream.classes.index(name) if name in stream.classes else -1)
    again = Stream.make(images, 3, 5, 3, seed=1)
    assert (again.tasks, again.test_keys) == (stream.tasks, stream.test_keys)
    assert Stream.make(images, 3, 5, 3, seed=2).tasks != stream.tasks
    with pytest.raises(ValueError, match="17 classes, not 20"):
        Stream.make(images, 4, 5, 3, seed=1)


def test_a_prior_is_computed_on_training_images_that_were_not_learned(data: Path) -> None:
    images = ImageSet.load(data / "caltech.safetensors")
    tasks, fresh, labels = training_stream(images, 2, 3, per_class=2, seed=0)
    learned = {key for task in tasks for keys in task.values() for key in keys}
    assert all(key.startswith("train/") for key in [*learned, *fresh])
    assert not learned & set(fresh)
    assert len(learned) == 12
    assert sorted(set(labels.tolist())) == list(range(17))
    owner = {images.tensors["train.labels"][int(key.split("/")[1])] for key in tasks[0]["0000"]}
    own_fresh = [key for key, label in zip(fresh, labels, strict=True) if label == 0]
    assert {images.tensors["train.labels"][int(key.split("/")[1])] for key in own_fresh} == owner


def test_cells_are_chosen_by_pattern() -> None:
    missing = Path("missing")
    assert len(cells(["main"], missing)) == 4 * 3 * 5
    names = [cell.name for cell in cells(["main", "few"], missing, ["*-cifar10-*-0-ours"])]
    assert sorted(names) == ["few-cifar10-10-0-ours", "few-cifar10-5-0-ours", "main-cifar10-20-0-ours"]
    # Without image sets, the suite for CI runs on generated images.
    assert {cell.data for cell in cells(["short"], missing)} == {"made"}


def test_the_time_left_is_estimated_per_group() -> None:
    ours, closed = (Cell("main", "caltech", 20, 0, group, 8, 5, "x") for group in ("ours", "closed"))
    assert time_left({"ours": [10.0, 20.0], "closed": [2.0]}, [ours, ours, closed]) == pytest.approx(32.0)
    assert time_left({"ours": [10.0]}, [closed]) == pytest.approx(10.0)


def test_a_run_reports_resumes_and_compares_with_the_reference(
    environment: pytest.MonkeyPatch,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, reference = tmp_path / "out", tmp_path / "short.json"
    command = ["--data", str(data), "--out", str(out), "--suite", "short", "--threads", "1"]
    command += ["--reference", str(reference)]
    quick = ["--set", '{"epochs": 1, "back_epochs": 1, "gate_accuracy": 1}']
    assert main([*command, *quick, "--write-reference"]) == 0
    report = json.loads((out / "accuracy-short.json").read_text())
    rows = report["results"]["caltech, 20 images per class"]
    paper = {"paper", "paper-no-coefficient", "paper-no-back", "paper-neither"}
    assert set(rows) == {"ours", "provisional", *paper, "slda", "ncm", "ranpac", "knn", "joint"}
    for row in rows.values():
        assert len(row["results"][0]["accuracy"]) == len(row["results"][0]["auc"]) == 3
        assert row["results"][0]["theorem_1"]["largest_relative_gap"] < 1e-9
    assert rows["ours"]["mean"]["rejected"] is not None
    assert {entry["figure"] for entry in report["differences"]} == {"last", "ai_auc"}
    table = (out / "accuracy-short.md").read_text()
    assert table in capsys.readouterr().out
    assert sum(line.startswith("| caltech, 20 |") for line in table.splitlines()) == len(rows)
    assert (out / "accuracy-short.png").read_bytes().startswith(b"\x89PNG")

    # A second call runs nothing, one with other settings only what depends on them.
    ran: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_run", lambda self, cell: ran.append(cell.group))
        assert main([*command, *quick]) == 0
        assert ran == []
        main([*command, "--set", '{"epochs": 2}'])
        assert sorted(ran) == ["ours", "paper"]

    # A figure that drops by more than its spread fails the run.
    known = json.loads(reference.read_text())
    known["caltech"]["ours"]["last"]["value"] += 2 * known["caltech"]["ours"]["last"]["spread"] + 0.01
    reference.write_text(json.dumps(known))
    assert main([*command, "--report-only"]) == 1
    assert "dropped: caltech, ours: last" in capsys.readouterr().err


def test_tokens_are_computed_once_and_read_from_the_file_later(
    environment: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    from benchmarks.accuracy.data import StoredTokens
    from models.network.backbone import open_backbone

    images = ImageSet.load(data / "caltech.safetensors")
    backbone = open_backbone(tmp_path / "backbone", "tf_efficientnet_lite0")
    keys = ["train/3", "test/0", "train/0"]
    first = StoredTokens(backbone, images, tmp_path).get(keys)

    def fail(key: str) -> bytes:
        raise AssertionError(f"{key} was read again")

    later = StoredTokens(backbone, images, tmp_path)
    later._read = fail
    assert (later.get(keys[::-1]).flip(0) == first).all()


def test_a_cell_that_fails_does_not_stop_the_others(data: Path, tmp_path: Path) -> None:
    ran = []

    def run(self: Runner, cell: Cell) -> None:
        ran.append(cell.group)
        if cell.group == "ours":
            raise RuntimeError("broken")

    setup = Setup(data, tmp_path, tmp_path, None, 1, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_run", run)
        assert Runner(setup).run(cells(["short"], data)) == 1
    assert ran == ["ours", "paper", "closed"]
