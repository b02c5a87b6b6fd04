"""`openworld learn`, `predict` and `versions`, from the command line to the bytes in the data folder."""

import errno
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models import files
from models.versions.store import VersionStore
from openworld.cli import main
from tests.support.images import write_classes
from tests.support.paths import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("environment")

COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (30, 50, 200), "white": (235, 235, 235)}

Run = Any


def coloured(name: str, seed: int, format: str = "JPEG") -> bytes:
    """A picture that a pre-trained network tells apart from those of other names."""
    rng = np.random.default_rng([seed, *COLOURS[name]])
    pixels = np.clip(np.array(COLOURS[name]) + rng.normal(0, 20, (48, 48, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=format)
    return buffer.getvalue()


def batch_of(folder: Path, *names: str, images: range = range(6)) -> Path:
    return write_classes(folder, {name: [coloured(name, n) for n in images] for name in names})


def tree(folder: Path) -> dict[str, str]:
    """Every file with its hash and every folder with none; the lock of a training is empty and stays."""
    paths = (path for path in sorted(folder.rglob("*")) if path.name != ".lock")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in paths
    }


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("batches")
    return SimpleNamespace(
        first=batch_of(root / "first", "red", "green"),
        second=batch_of(root / "second", "blue", "white"),
        more_red=batch_of(root / "more", "red", images=range(100, 104)),
        # A known class under other names: nobody could tell them apart, so `red` suffers.
        wrong=write_classes(root / "wrong", {n: [coloured("red", i) for i in at] for n, at in WRONG.items()}),
    )


WRONG = {"crimson": range(50, 56), "scarlet": range(60, 66)}


@pytest.fixture(scope="module")
def first(environment: None, batches: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder that has learned one task; never to be changed."""
    data = tmp_path_factory.mktemp("first") / "data"
    assert main(["learn", str(batches.first), "--data", str(data)]) == 0
    return data


@pytest.fixture
def data(first: Path, tmp_path: Path) -> Path:
    """A copy of it, to be used up."""
    return Path(shutil.copytree(first, tmp_path / "data"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; its exit code, stdout and stderr."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture
def no_export(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh folders get the graphs that were exported already: the export takes longer than all the rest."""
    store = VersionStore(first)
    graphs = {role: store.graph_path(sha).read_bytes() for role, sha in store.manifest(1).graphs.items()}
    monkeypatch.setattr("trainer.publish.export", lambda backbone: graphs)


# Learning


def test_what_was_learned_is_recognised(first: Path, batches: SimpleNamespace, run: Run) -> None:
    code, out, _ = run("predict", batches.first, "--data", first, "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert len(answers) == 12
    right = [Path(answer["file"]).parent.name == answer["label"] for answer in answers]
    assert sum(right) >= 10
    fields = {"file", "version", "label", "novel", "score", "calibrated_score", "p_novel", "task", "nearest"}
    assert set(answers[0]) == fields
    code, out, _ = run("predict", batches.first / "red" / "0.jpg", "--data", first)
    assert code == 0
    assert "looks like" in out
    assert "red 100.0 %" in out


def test_a_second_task_extends_the_first_and_both_are_recognised(
    data: Path, batches: SimpleNamespace, run: Run
) -> None:
    code, out, err = run("learn", batches.second, "--data", data)
    assert code == 0, out + err
    assert "version 2 is current" in out
    assert re.search(r"1 │ green, red +│ +12 │.*→", out)
    assert re.search(r"task 2: epoch 1/3, loss [0-9.]+, .* left", err)
    assert "UserWarning" not in err
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
    listed = json.loads(run("versions", "--data", data, "--json")[1])
    assert listed["current"] == 2
    assert [version["added"] for version in listed["versions"]] == [["green", "red"], ["blue", "white"]]


def test_the_same_batch_is_not_learned_twice(first: Path, batches: SimpleNamespace, run: Run) -> None:
    before = tree(first)
    code, out, _ = run("learn", batches.first, "--data", first, "--seed", "9")
    assert code == 0
    assert "already learned as version 1" in out
    code, out, _ = run("learn", batches.first, "--data", first, "--json")
    assert json.loads(out)["state"] == "already learned"
    assert tree(first) == before


def test_more_images_of_a_known_class_make_a_version_with_no_new_head(
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
    """Images that each class of the first task was learned from."""
    counts: list[int] = VersionStore(data).load(version).tensors["task.0.gaussians.counts"].tolist()
    return counts


def test_a_folder_that_grew_by_one_picture_counts_the_old_ones_once(
    data: Path, batches: SimpleNamespace, tmp_path: Path, run: Run
) -> None:
    grown = Path(shutil.copytree(batches.first, tmp_path / "grown"))
    (grown / "red" / "late.jpg").write_bytes(coloured("red", 200))
    code, _, err = run("learn", grown, "--data", data)
    assert code == 0, err
    assert counts_of(data, 1) == [6, 6]
    assert counts_of(data, 2) == [6, 7]
    seen = VersionStore(data).load(2).samples["seen"]
    assert {name: len(set(keys)) for name, keys in seen.items()} == {"green": 6, "red": 7}
    assert {name: len(keys) for name, keys in seen.items()} == {"green": 6, "red": 7}


def test_a_part_of_what_was_learned_is_said_to_be_learned_already(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run
) -> None:
    before = tree(first)
    part = write_classes(tmp_path / "part", {"red": [coloured("red", n) for n in range(3)]})
    code, _, err = run("learn", part, "--data", first)
    assert code == 2
    assert "every image of this batch is learned already" in err
    assert tree(first) == before


def test_an_image_that_was_learned_under_another_label_is_refused(first: Path, tmp_path: Path, run: Run) -> None:
    before = tree(first)
    clash = write_classes(tmp_path / "clash", {"cherry": [coloured("red", 0), coloured("red", 300)]})
    code, _, err = run("learn", clash, "--data", first)
    assert code == 2
    assert "cherry/0.jpg is 'cherry' here, but was learned as 'red'" in err
    assert "cherry/1.jpg" not in err
    assert tree(first) == before


def test_a_second_task_follows_the_rule_that_it_is_given(
    data: Path, batches: SimpleNamespace, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENWORLD_TRAIN_ADAPTED_BLOCKS", "")  # empty is as good as unset
    code, _, err = run("learn", batches.second, "--data", data, "--rule", "paper", "--gate-auc", "1")
    assert code == 0, err
    store = VersionStore(data)
    assert store.manifest(1).rule["name"] == "product"
    assert store.manifest(2).rule["name"] == "paper"
    assert set(store.manifest(2).rule["constants"]) == {"temperature"}
    assert store.manifest(2).settings["adapted_blocks"] is None


def test_two_runs_give_the_same_bytes(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run, no_export: None
) -> None:
    assert run("learn", batches.first, "--data", tmp_path)[0] == 0
    for name in ("model.safetensors", "samples.json"):
        place = Path("versions/000001") / name
        assert (tmp_path / place).read_bytes() == (first / place).read_bytes()


def test_a_rejected_version_is_kept_aside_and_exits_with_3(data: Path, batches: SimpleNamespace, run: Run) -> None:
    code, out, err = run("learn", batches.wrong, "--data", data, "--gate-accuracy", "0", "--gate-auc", "0")
    assert code == 3
    assert "none: rejected" in out
    assert "rejected, version 1 stays current" in err
    assert "accuracy fell" in err
    store = VersionStore(data)
    assert store.current() == 1
    assert store.versions() == [1]
    kept = re.search(r"kept in (.+)", err)
    assert kept
    assert (Path(kept[1]) / "model.safetensors").is_file()
    out = run("versions", "--data", data)[1]
    assert "rejected" in out
    assert "crimson, scarlet" in out

    # With larger margins it is judged again, not trained again.
    code, out, err = run("learn", batches.wrong, "--data", data, "--gate-accuracy", "1", "--gate-auc", "1")
    assert code == 0, err
    assert "version 2 is current" in out
    assert "epoch" not in err
    assert [path.name for path in (data / "work").iterdir()] == [".lock"]


# Mistakes


@pytest.fixture
def bad_batch(tmp_path: Path) -> Path:
    folder = batch_of(tmp_path / "bad", "blue")
    write_classes(folder, {"white": [coloured("white", 0)], "Red": [coloured("red", 50), coloured("red", 51)]})
    (folder / "blue" / "broken.jpg").write_bytes(coloured("blue", 60)[:200])
    (folder / "loose.txt").write_text("hello")
    return folder


def test_a_bad_batch_is_refused_with_every_problem_and_changes_nothing(first: Path, bad_batch: Path, run: Run) -> None:
    before = tree(first)
    code, _, err = run("learn", bad_batch, "--data", first)
    assert code == 2
    for problem in (
        "'white' has 1 image only",
        "'blue/broken.jpg' cannot be read",
        "'loose.txt' lies",
        "known class 'red'",
    ):
        assert problem in err
    assert tree(first) == before


def test_a_bad_batch_does_not_make_a_data_folder(bad_batch: Path, tmp_path: Path, run: Run) -> None:
    code, _, err = run("learn", bad_batch, "--data", tmp_path / "a" / "b")
    assert code == 2
    assert "problems" in err
    assert not (tmp_path / "a").exists()
    code, _, err = run("learn", tmp_path / "nowhere", "--data", tmp_path / "a")
    assert code == 2
    assert "does not exist" in err
    assert not (tmp_path / "a").exists()


def test_more_classes_than_the_memory_holds_are_refused_before_the_training(
    first: Path, batches: SimpleNamespace, run: Run
) -> None:
    before = tree(first)
    code, _, err = run("learn", batches.second, "--data", first, "--memory", "3")
    assert code == 2
    assert "4 classes do not fit a memory of 3 images" in err
    assert tree(first) == before


def test_another_backbone_than_the_recorded_one_is_refused(first: Path, batches: SimpleNamespace, run: Run) -> None:
    before = tree(first)
    code, _, err = run("learn", batches.second, "--data", first, "--backbone", "resnet18")
    assert code == 2
    assert "made with tf_efficientnet_lite0" in err
    assert tree(first) == before


def test_an_unknown_backbone_does_not_make_a_data_folder(batches: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    code, _, err = run("learn", batches.first, "--data", tmp_path / "a" / "b", "--backbone", "no_such_model")
    assert code == 2
    assert "no_such_model" in err
    assert not (tmp_path / "a").exists()


def test_an_invalid_setting_is_named_by_its_option_or_its_variable(
    batches: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENWORLD_TRAIN_REPLAY_SIZE", "many")
    code, _, err = run("learn", batches.first, "--data", tmp_path / "data", "--epochs", "0")
    assert code == 2
    assert "--epochs: input should be greater than or equal to 1" in err
    assert "OPENWORLD_TRAIN_REPLAY_SIZE: input should be a valid integer" in err
    assert "Traceback" not in err
    assert not (tmp_path / "data").exists()


def test_learning_without_torch_says_what_to_install(
    batches: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run("learn", batches.first, "--data", tmp_path / "data")
    assert code == 2
    assert "pip install 'openworld[train]'" in err


def test_two_trainings_in_one_folder_are_refused(first: Path, batches: SimpleNamespace, run: Run) -> None:
    from trainer.data_folder import training_lock

    before = tree(first)
    with training_lock(first):
        code, _, err = run("learn", batches.second, "--data", first)
    assert code == 2
    assert "another training is running" in err
    assert tree(first) == before


# A full disk


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_too_little_space_is_said_before_anything_is_written(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    before = tree(first)
    for folder in (first, tmp_path / "a" / "b"):
        code, _, err = run("learn", batches.second, "--data", folder)
        assert code == 2
        assert "not enough disk space" in err
        assert "1 MiB are free" in err
    assert tree(first) == before
    assert not (tmp_path / "a").exists()


def test_a_disk_that_fills_up_while_images_are_stored_leaves_nothing_behind(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = {first: 15, tmp_path / "a" / "b": 3}  # images; the first has 12

    def write(path: Path, data: bytes) -> None:
        images = path.parent.parent
        if len(list(images.glob("*/*"))) >= room[images.parent]:
            full()
        files.write_durable(path, data)

    monkeypatch.setattr("tasks.images.store.write_durable", write)
    before = tree(first)
    for folder in room:
        code, _, err = run("learn", batches.second, "--data", folder)
        assert code == 2
        assert "the disk is full" in err
    assert tree(first) == before
    assert not (tmp_path / "a").exists()


def test_a_disk_that_is_full_at_the_end_keeps_the_current_version_and_the_epochs(
    data: Path, batches: SimpleNamespace, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(data)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_folder", full)
        code, _, err = run("learn", batches.second, "--data", data)
    assert code == 2
    assert "the disk is full, nothing was published" in err
    assert {name: sha for name, sha in tree(data).items() if not name.startswith("work/")} == before
    code, out, err = run("learn", batches.second, "--data", data)
    assert code == 0
    assert "version 2 is current" in out
    assert "task 2: epoch" not in err, "it was trained again"


def test_work_that_was_given_up_is_swept_when_a_version_is_published(
    data: Path, batches: SimpleNamespace, run: Run
) -> None:
    (data / "work" / "given up").mkdir()
    (data / "work" / "given up" / "task 2").write_bytes(b"epochs")
    assert run("learn", batches.more_red, "--data", data)[0] == 0
    assert [path.name for path in (data / "work").iterdir()] == [".lock"]


# Predicting and listing


def test_a_file_that_cannot_be_read_fails_alone(
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


def test_a_name_is_never_read_as_markup(first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "[bold]a[red].jpg"
    shutil.copy(batches.first / "red" / "0.jpg", path)
    code, out, _ = run("predict", path, "--data", first)
    assert code == 0
    assert "[bold]a[red].jpg" in out


def test_an_absent_version_is_refused_with_those_there_are(first: Path, batches: SimpleNamespace, run: Run) -> None:
    code, _, err = run("predict", batches.first, "--data", first, "--version", "9")
    assert code == 2
    assert "there is no version 9" in err


def test_where_nothing_is_learned_the_commands_say_how_to_start(tmp_path: Path, run: Run) -> None:
    code, out, _ = run("versions", "--data", tmp_path / "data")
    assert code == 0
    assert "openworld learn FOLDER --data" in out
    code, _, err = run("predict", "x.jpg", "--data", tmp_path / "data")
    assert code == 2
    assert "openworld learn FOLDER --data" in err
    assert not (tmp_path / "data").exists()


def test_help_predict_and_versions_do_without_torch(first: Path, batches: SimpleNamespace) -> None:
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
    assert "a first round" in done.stdout


# Rolling back


@pytest.fixture
def two_versions(data: Path) -> Path:
    """As after a second task, which here has learned nothing."""
    store = VersionStore(data)
    one = store.load(1)
    manifest = one.manifest.model_copy(update={"parent": 1, "task_id": "second"})
    assert store.publish(manifest, one.tensors, one.samples).version == 2
    return data


def test_an_operator_rolls_back_and_forward_from_the_command_line(
    two_versions: Path, batches: SimpleNamespace, run: Run
) -> None:
    code, out, _ = run("versions", "--data", two_versions, "--activate", "1")
    assert code == 0
    assert re.search(r"current │ +1 │", out)
    store = VersionStore(two_versions)
    assert store.current() == 1
    assert [(line.version, line.by) for line in store.log()] == [(1, "trainer"), (2, "trainer"), (1, "operator")]
    assert json.loads(run("versions", "--data", two_versions, "--activate", "2", "--json")[1])["current"] == 2
    assert store.current() == 2
    code, out, _ = run("learn", batches.first, "--data", two_versions)
    assert code == 0
    assert "already learned as version 1 (version 2 is current: openworld versions --activate 1)" in " ".join(
        out.split()
    )


@pytest.mark.parametrize("number", ["9", "0", "-1"])
def test_rolling_back_to_a_version_that_is_not_there_changes_nothing(
    two_versions: Path, tmp_path: Path, run: Run, number: str
) -> None:
    before = tree(two_versions)
    code, out, err = run("versions", "--data", two_versions, f"--activate={number}")
    assert (code, out) == (2, "")
    assert f"there is no version {number}" in err
    assert tree(two_versions) == before
    assert run("versions", "--data", tmp_path / "nothing", "--activate", "1")[0] == 2
    assert not (tmp_path / "nothing").exists()


def test_a_damaged_version_is_not_rolled_back_to_and_a_damaged_current_is_repaired(
    two_versions: Path, run: Run
) -> None:
    (two_versions / "versions/000002/samples.json").write_text("{}")
    (two_versions / "CURRENT").write_text("?")
    code, _, err = run("versions", "--data", two_versions, "--activate", "2")
    assert code == 2
    assert "samples.json" in err
    code, _, err = run("versions", "--data", two_versions)
    assert code == 2
    assert "openworld versions --activate N" in err
    assert run("versions", "--data", two_versions, "--activate", "1")[0] == 0
    assert VersionStore(two_versions).current() == 1
