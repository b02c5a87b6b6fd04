"""The scaling benchmark: its random versions are served, and its bars compare the fewest with the most tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.scaling import learning, made_models, plot
from benchmarks.scaling.__main__ import arguments
from benchmarks.scaling.made_models import Configuration, MadeVersions
from benchmarks.scaling.serving import bars, merged, summarise
from models.inference.model import Model
from models.inference.predictor import Predictor
from models.inference.stored_model import model_tensors
from tests.support import exported  # registers tiny_test_vit
from tests.support.tiny_model import features_of, tiny_learner


def cell(rate: float, memory: float = 400.0, swap: float = 0.5) -> dict[str, Any]:
    load = {"images_per_second": rate, "p50_ms": 1.0, "p99_ms": 2.0}
    return {"cold_start_seconds": 2.0, "idle": load, "saturated": load, "memory_mib": memory, "swap_seconds": swap}


def test_random_versions_answer_and_run_as_many_networks_as_the_cascade_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_models, "export", exported.export_once)
    made = MadeVersions(tmp_path / "data", Configuration("tiny", exported.tiny_test_vit.__name__, 2), None)
    versions = [made.publish(3), made.publish(3, newest=99)]
    answers = []
    for version in versions:
        predictor = Predictor.open(tmp_path / "data", version, "cpu", 1)
        pixels = np.zeros((2, 3, 64, 64), np.float32)
        features = predictor.runtime.features(predictor.model, pixels)
        assert features.ran is not None
        assert features.ran.sum(axis=1).tolist() == [2, 2]
        answers.append([scored.answer for scored in predictor.score(list(pixels))])
    assert not any(answer.novel for pair in answers for answer in pair)
    names = [Predictor.open(tmp_path / "data", version, "cpu", 1).model.tasks[-1].classes[0] for version in versions]
    assert names == ["class 2.0", "class 99.0"]


def test_random_versions_of_a_cut_cnn_weigh_a_refined_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tiny_learner(cnn=True, tail=True)
    monkeypatch.setattr(Configuration, "open", lambda *_: own.backbone)
    monkeypatch.setattr(made_models, "export", lambda _: {"trunk": b"graph"})
    models: list[Model] = []
    monkeypatch.setattr(made_models, "model_tensors", lambda model: (models.append(model), model_tensors(model))[1])
    MadeVersions(tmp_path / "data", Configuration("tiny", "tiny", 1), None).publish(3)
    evidence = models[0].evidence(features_of(own, models[0], ["class 0/0", "class 1/0"]))
    assert models[0].uses_refined
    assert np.isfinite(models[0].rule.log_scores(evidence)).all()


@pytest.mark.parametrize(
    ("rates", "memory", "swap", "unmet"),
    [
        ([100.0, 91.0], 590.0, 0.9, 0),
        ([100.0, 89.0], 590.0, 0.9, 1),
        ([100.0, 91.0], 600.0, 0.9, 1),
        ([100.0, 91.0], 590.0, 1.1, 1),
    ],
)
def test_the_bars_compare_the_fewest_with_the_most_tasks(
    rates: list[float], memory: float, swap: float, unmet: int
) -> None:
    found = summarise([120.0], {1: [cell(rates[0])], 50: [cell(rates[1], memory, swap)]})
    assert found["tasks"]["50"]["of_fewest_tasks"] == pytest.approx(rates[1] / rates[0])
    assert sum(not line["met"] for line in bars("offline default", found)) == unmet


def test_ratios_are_taken_round_by_round() -> None:
    found = summarise([1.0], {1: [cell(100.0), cell(50.0), cell(80.0)], 5: [cell(90.0), cell(45.0), cell(20.0)]})
    assert found["tasks"]["5"]["of_fewest_tasks"] == pytest.approx(0.9)


def test_a_later_run_adds_configurations_to_a_report() -> None:
    old, new = (summarise([120.0], {1: [cell(rate)], 50: [cell(rate)]}) for rate in (100.0, 90.0))
    earlier = {"configurations": {"DeiT-Ti, 2 blocks": old, "DeiT-Ti, 12 blocks": old}}
    found = merged(earlier, {"configurations": {"offline default": new, "DeiT-Ti, 2 blocks": new}})
    assert found["configurations"] == {
        "offline default": new,
        "DeiT-Ti, 2 blocks": new,
        "DeiT-Ti, 12 blocks": old,
    }
    assert len(found["bars"]) == 6


def test_a_report_is_drawn(tmp_path: Path) -> None:
    plot.draw({"offline default": summarise([120.0], {1: [cell(100.0)], 5: [cell(99.0)]})}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("words", [["--tasks", "0"], ["--tasks", "x"], ["--rounds", "0"], ["--seconds", "0"]])
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--json", "out.json", *words])


def test_the_last_tasks_are_compared_with_the_first_ones_of_both_services() -> None:
    seconds = [(60.0, 70.0), *[(2.0, 5.0)] * 10, *[(4.0, 14.0)] * 10]
    rows, again = (
        [
            {"tasks": n, "provisional_seconds": one, "refined_seconds": other}
            for n, (one, other) in enumerate(part, start=1)
        ]
        for part in (seconds, [(60.0, 70.0), *[(1.0, 3.0)] * 3])
    )
    found = learning.summarise(rows, again)
    assert (found["first_tasks"], found["last_tasks"]) == ([2, 3, 4], list(range(12, 22)))
    assert [bar["found"] for bar in found["bars"]] == [1.5, 4.0, 14.0, 3.5]
    assert [bar["met"] for bar in found["bars"]] == [True, True, True, False]
