"""The accuracy benchmark: metrics computed by hand, and a complete run on generated images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.images import make_image

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from benchmarks.accuracy.__main__ import main
from benchmarks.accuracy.data import ImageSet, Stream
from benchmarks.accuracy.metrics import Step, measure, theorem_1
from benchmarks.accuracy.run import METHODS

Floats = NDArray[np.float64]

# Two tasks of two classes: one image per class in this order, and a second one of the first class.
LABELS = np.array([0, 1, 2, 3, 0])
AFTER_ONE = Step(np.log(np.array([[8, 1], [2, 7], [6, 1], [3, 3.5], [5, 1]])), np.array([0, 0]))
AFTER_TWO = Step(
    np.log(
        np.array(
            [
                [8.0, 1, 2, 1],  # right
                [4, 3, 1, 1],  # right task, wrong class
                [1, 1, 6, 2],  # right
                [1, 9, 2, 3],  # wrong task, right class within the task
                [2, 1, 1, 5],  # wrong task, right class within the task
            ]
        )
    ),
    np.array([0, 0, 1, 1]),
)


def test_metrics_of_a_small_run_match_hand_computed_values() -> None:
    result = measure([AFTER_ONE, AFTER_TWO], LABELS)
    assert result.accuracy == [1.0, pytest.approx(2 / 5)]
    # Known: 8, 7, 5. Not yet learned: 6 and 3.5. Five of the six pairs are in order.
    assert result.auc == [pytest.approx(5 / 6)]
    assert result.forgetting == pytest.approx(1 - 1 / 3)  # the first task: all of three, then one
    assert result.within_task == pytest.approx(4 / 5)
    assert result.task_prediction == pytest.approx(3 / 5)
    assert result.last == pytest.approx(0.4)
    assert result.aia == pytest.approx(0.7)
    assert result.ai_auc == pytest.approx(5 / 6)
    assert result.mean == pytest.approx((0.7 + 5 / 6) / 2)
    assert result.to_dict()["aia"] == result.aia


def test_entropies_of_theorem_1_match_hand_computed_values() -> None:
    only = Step(np.log(np.array([[6.0, 2, 1, 1]])), np.array([0, 0, 1, 1]))
    found = theorem_1(only, np.array([0]))
    assert found["h_cil"] == pytest.approx(-np.log(6 / 10))
    assert found["h_wp"] == pytest.approx(-np.log(6 / 8))
    assert found["h_tp"] == pytest.approx(-np.log(8 / 10))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 8),
    st.sampled_from([0.1, 5.0, 1000.0]),
)
def test_theorem_1_holds_for_any_scores(seed: int, counts: list[int], images: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    tasks = np.repeat(np.arange(len(counts)), counts)
    step = Step(rng.normal(0, scale, (images, len(tasks))), tasks)
    found = theorem_1(step, rng.integers(0, len(tasks), images))
    assert found["largest_relative_gap"] < 1e-9
    assert found["h_cil"] == pytest.approx(found["h_wp"] + found["h_tp"], abs=1e-9 * max(1, scale))
    assert min(found["h_wp"], found["h_tp"]) >= -1e-9


def write_image_set(path: Path, per_class: dict[str, int], classes: int = 4) -> Path:
    """Write an image set in the benchmark's format."""
    tensors: dict[str, NDArray[Any]] = {}
    for split, count in per_class.items():
        labels = np.repeat(np.arange(classes), count)
        images = [make_image(1000 * len(split) + i, (24 + 8 * int(label), 24)) for i, label in enumerate(labels)]
        tensors[f"{split}.bytes"] = np.frombuffer(b"".join(images), np.uint8)
        tensors[f"{split}.offsets"] = np.cumsum([0, *map(len, images)])
        tensors[f"{split}.labels"] = labels
    save_file(tensors, path, {"classes": json.dumps([f"class {c}" for c in range(classes)])})
    return path


def test_a_stream_cuts_all_classes_into_equal_tasks(tmp_path: Path) -> None:
    images = ImageSet.load(write_image_set(tmp_path / "set.safetensors", {"train": 6, "test": 2}))
    stream = Stream.make(images, 2, 3, None, seed=1)
    assert [len(task) for task in stream.tasks] == [2, 2]
    assert {name for task in stream.tasks for name in task} == set(images.classes)
    assert all(len(keys) == 3 for task in stream.tasks for keys in task.values())
    assert len(stream.test_keys) == len(stream.test_labels) == 8
    assert images.read("train/0") == make_image(5000, (24, 24))
    assert Stream.make(images, 2, 3, None, seed=1) == stream
    with pytest.raises(SystemExit, match="4 classes cannot be cut into 3 equal tasks"):
        Stream.make(images, 3, None, None, seed=1)


def test_a_run_reports_every_method_as_json_markdown_and_plot(
    environment: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("OPENWORLD_TRAIN_EPOCHS", "1")
    data, out = (
        write_image_set(tmp_path / "noise.safetensors", {"train": 6, "test": 3}),
        tmp_path / "reports" / "noise.json",
    )
    command = ["--data", data, "--tasks", 2, "--memory", 8, "--backbone", "tf_efficientnet_lite0", "--json", out]
    main([str(part) for part in [*command, "--threads", 1]])
    report = json.loads(out.read_text())
    assert list(report["methods"]) == list(METHODS)
    for result in report["methods"].values():
        assert len(result["accuracy"]) == 2
        assert len(result["auc"]) == 1
        assert 0 <= result["mean"] <= 1
        assert result["theorem_1"]["largest_relative_gap"] < 1e-9
    assert report["backbone"]["name"] == "tf_efficientnet_lite0"
    assert report["settings"]["epochs"] == 1
    assert report["test_images"] == 12
    assert "OPENWORLD_TRAIN_EPOCHS=1" in report["command"]
    table = out.with_suffix(".md").read_text()
    assert table == capsys.readouterr().out[: len(table)]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(METHODS)  # header, rule and one row per method
    assert "![accuracy and AUC after each task](noise.png)" in table
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_method_is_refused_and_the_known_ones_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--data", str(tmp_path / "x"), "--json", str(tmp_path / "y.json"), "--methods", "more,magic"])
    assert "unknown method magic; there are more, more-product" in capsys.readouterr().err
