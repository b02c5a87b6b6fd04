"""`openworld learn`: from a folder of images to a version."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tests.support.coloured_images import coloured_image, tree
from tests.support.images import write_classes
from tests.support.version_stores import seen_by_name

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("environment")

Run = Any


def test_learned_classes_are_recognised(first: Path, batches: SimpleNamespace, run: Run) -> None:
    code, out, _ = run("predict", batches.first, "--data", first, "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert len(answers) == 12
    right = [Path(answer["file"]).parent.name == answer["label"] for answer in answers]
    assert sum(right) >= 10
    fields = {
        *("file", "version", "label", "novel", "certainty", "score", "calibrated_score", "p_novel", "task", "nearest")
    }
    assert set(answers[0]) == fields
    code, out, _ = run("predict", batches.first / "red" / "0.jpg", "--data", first)
    assert code == 0
    assert re.search(r"│ sure: red \((9\d|100) %\) │", out)
    assert not re.search(r"-?\d\.\d", out), "a score in a table for people"


def test_a_second_task_extends_the_first_and_both_are_recognised(
    data: Path, batches: SimpleNamespace, run: Run
) -> None:
    code, out, err = run("learn", batches.second, "--data", data)
    assert code == 0, out + err
    assert "version 2 is current" in out
    assert re.search(r"1 │ green, red +│ +[2-9] │.*→", out)
    assert re.search(r"task 2: epoch 1/3, loss [0-9.]+, .* left", err)
    assert "UserWarning" not in err
    assert "what scores below 95 % of known images" in out
    assert re.search(r"for fresh images, accuracy [0-9.]+ %; too few classes to estimate", out)
    assert "AUC of novelty" not in out
    assert VersionStore(data).manifest(2).metrics["novelty_auc"] is not None
    assert re.search(r"learned blue, white +│ +4 │ +[0-9.]+ % +│ +– │", run("versions", "--data", data)[1])
    manifest = VersionStore(data).manifest(2)
    assert manifest.parent == 1
    assert manifest.tasks == [["green", "red"], ["blue", "white"]]
    assert manifest.data_sha256.startswith(manifest.task_id)
    assert str(data) not in manifest.to_json().decode()

    code, out, _ = run("predict", batches.first, batches.second, "--data", data, "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    nearest = [Path(answer["file"]).parent.name == answer["nearest"][0][0] for answer in answers]
    assert sum(nearest) >= 20
    assert {answer["version"] for answer in answers} == {2}

    code, out, _ = run("versions", "--data", data)
    assert code == 0
    assert re.search(r"current │ +2 │ +1 │.*blue, white", out)
    assert "threshold" not in out, "a log-score in a table for people"
    listed = json.loads(run("versions", "--data", data, "--json")[1])
    assert listed["current"] == 2
    assert [version["added"] for version in listed["versions"]] == [["green", "red"], ["blue", "white"]]


def test_an_image_with_a_wrong_label_is_named_by_its_file(tmp_path: Path, run: Run) -> None:
    images = {name: [coloured_image(name, n) for n in range(10)] for name in ("red", "green")}
    batch = write_classes(tmp_path / "batch", images)
    (batch / "red" / "mistake.jpg").write_bytes(coloured_image("green", 77))
    code, out, err = run("learn", batch, "--data", tmp_path / "data")
    assert code == 0, err
    assert "what would help:" in out
    assert re.search(r"red/mistake.jpg is labelled red, but looks like green \(\d+ %\): check its label", out)


def test_the_same_batch_is_not_learned_twice(first: Path, batches: SimpleNamespace, run: Run) -> None:
    before = tree(first)
    code, out, _ = run("learn", batches.first, "--data", first, "--seed", "9")
    assert code == 0
    assert "already learned as version 1" in out
    code, out, _ = run("learn", batches.first, "--data", first, "--json")
    assert json.loads(out)["state"] == "already learned"
    assert tree(first) == before


def test_more_images_of_a_known_class_make_a_version_without_a_new_head(
    data: Path, batches: SimpleNamespace, run: Run
) -> None:
    code, out, err = run("learn", batches.more_red, "--data", data, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["state"], result["version"]) == ("published", 2)
    assert result["tasks"] == [["green", "red"]]
    assert result["metrics"]["images_per_class"] == {"red": 4}
    assert "more of red" in run("versions", "--data", data)[1]


def counts_of(data: Path, version: int) -> list[int]:
    """Number of images per class in the statistics."""
    counts: list[int] = VersionStore(data).load(version).tensors["task.0/frozen.counts"].tolist()
    return counts


def test_images_that_are_submitted_again_are_counted_once(
    data: Path, batches: SimpleNamespace, tmp_path: Path, run: Run
) -> None:
    grown = Path(shutil.copytree(batches.first, tmp_path / "grown"))
    (grown / "red" / "late.jpg").write_bytes(coloured_image("red", 200))
    code, _, err = run("learn", grown, "--data", data)
    assert code == 0, err
    assert counts_of(data, 1) == [6, 6]
    assert counts_of(data, 2) == [6, 7]
    seen = seen_by_name(data, 2)
    assert {name: len(set(keys)) for name, keys in seen.items()} == {"green": 6, "red": 7}
    assert {name: len(keys) for name, keys in seen.items()} == {"green": 6, "red": 7}


def test_a_subset_of_a_learned_batch_is_refused_as_learned_already(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run
) -> None:
    before = tree(first)
    part = write_classes(tmp_path / "part", {"red": [coloured_image("red", n) for n in range(3)]})
    code, _, err = run("learn", part, "--data", first)
    assert code == 2
    assert "every image of this batch is learned already" in err
    assert tree(first) == before


def test_an_image_that_was_learned_under_another_label_loses_it(data: Path, tmp_path: Path, run: Run) -> None:
    more = write_classes(tmp_path / "more", {"green": [coloured_image("red", 0), coloured_image("green", 300)]})
    code, _, err = run("learn", more, "--data", data)
    assert code == 0, err
    seen = seen_by_name(data)
    assert {name: len(keys) for name, keys in seen.items()} == {"green": 8, "red": 5}


def test_a_second_task_uses_the_given_rule(
    data: Path, batches: SimpleNamespace, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENWORLD_TRAIN_ADAPTED_BLOCKS", "")  # an empty variable counts as unset
    code, _, err = run("learn", batches.second, "--data", data, "--rule", "paper", "--gate-auc", "1")
    assert code == 0, err
    store = VersionStore(data)
    assert store.manifest(1).rule["name"] in (
        "refined feature",
        "closed form",
    )  # whichever is better on the held-out images
    assert store.manifest(2).rule["name"] == "paper"
    assert store.manifest(2).rule["weights"] == {"probability": 1.0, "coefficient": 1.0}
    assert store.manifest(2).settings["adapted_blocks"] is None


def test_two_runs_give_identical_files(first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    assert run("learn", batches.first, "--data", tmp_path)[0] == 0
    assert VersionStore(tmp_path).load().manifest.files == VersionStore(first).manifest(1).files


def test_a_rejected_version_is_kept_apart_and_the_exit_code_is_3(
    data: Path, batches: SimpleNamespace, run: Run
) -> None:
    code, out, err = run("learn", batches.confused, "--data", data, "--gate-accuracy", "0", "--gate-auc", "0")
    assert code == 3
    assert "none: rejected" in out
    assert "rejected, version 1 stays current" in err
    assert "accuracy fell" in err
    store = VersionStore(data)
    assert store.current() == 1
    assert store.versions() == [1]
    kept = re.search(r"kept in (.+)", err)
    assert kept
    assert Manifest.from_json(Path(kept[1]).read_bytes()).metrics["rejected"]
    out = run("versions", "--data", data)[1]
    assert "rejected" in out
    assert "crimson, scarlet" in out

    # With larger margins the gate runs again, without another training.
    code, out, err = run("learn", batches.confused, "--data", data, "--gate-accuracy", "1", "--gate-auc", "1")
    assert code == 0, err
    assert "version 2 is current" in out
    assert "epoch" not in err
    assert [path.name for path in (data / "work").iterdir()] == [".lock"]
