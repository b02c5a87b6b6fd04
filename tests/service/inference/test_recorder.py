"""The recorder: every answer is counted and kept, novel ones go to the inbox, unreadable images are counted only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.inference.answer import Answer, certainty
from models.inference.predictor import Scored
from service.inbox import Inbox
from service.inference.metrics import Metrics
from service.inference.recent_predictions import RecentPredictions
from service.inference.recorder import Recorder
from tests.support.images import make_image
from tests.support.metrics import series

IMAGE = make_image(1)
EMBEDDING = np.ones(4, np.float32)


def answer(novel: bool) -> Scored:
    label = None if novel else "apple"
    nearest = [("apple", 0.5)]
    return Scored(Answer(label, novel, certainty(label, nearest), -1.5, 0.25, 0.5, 0, nearest), EMBEDDING)


def predictions(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """By client, outcome and version."""
    return series(metrics.text().decode(), "openworld_predictions_total")


@pytest.mark.parametrize("with_inbox", [True, False], ids=["with an inbox", "without an inbox"])
def test_answers_are_counted_and_kept_and_novel_ones_reach_the_inbox(tmp_path: Path, with_inbox: bool) -> None:
    metrics, recent, inbox = Metrics(), RecentPredictions(), Inbox(tmp_path)
    recorder = Recorder(metrics, recent)
    if with_inbox:
        recorder.use_inbox(inbox)
    recorder.record(IMAGE, answer(novel=False), "known-1", 7, "robot")
    recorder.record(IMAGE, answer(novel=True), "novel-1", 7, "robot")
    recorder.record_unreadable(7, "robot")
    recorder.close(10)

    outcomes = ("known", "novel", "error")
    assert predictions(metrics) == {("robot", outcome, "7"): 1 for outcome in outcomes}
    kept = [recent.get("known-1"), recent.get("novel-1")]
    assert [one.label for one in kept if one is not None] == ["apple", None]
    assert len(recent) == 2
    assert [one.prediction_id for one in inbox.list().items] == (["novel-1"] if with_inbox else [])
    inbox.close()


def test_a_sighting_has_the_whole_answer() -> None:
    recent = RecentPredictions()
    Recorder(Metrics(), recent).record(IMAGE, answer(novel=True), "id-1", 7, "robot")
    sighting = recent.get("id-1")
    assert sighting is not None
    assert (sighting.data, sighting.version, sighting.client, sighting.label) == (IMAGE, 7, "robot", None)
    assert (sighting.score, sighting.calibrated_score, sighting.p_novel) == (-1.5, 0.25, 0.5)
    assert list(sighting.nearest) == [("apple", 0.5)]
    assert sighting.embedding is EMBEDDING


def test_what_the_inbox_drops_is_counted_by_reason(tmp_path: Path) -> None:
    metrics, inbox = Metrics(), Inbox(tmp_path)
    recorder = Recorder(metrics, RecentPredictions())
    recorder.use_inbox(inbox)
    recorder.record(b"not an image", answer(novel=True), "id-1", 7, "robot")
    recorder.close(10)
    inbox.close()
    dropped = series(metrics.text().decode(), "openworld_novelties_dropped_total")
    assert {reason: count for reason, count in dropped.items() if count} == {("unreadable",): 1}


@pytest.mark.parametrize(("keep", "dropped"), [(True, 1), (False, 0)])
def test_novelties_without_an_inbox_are_counted_as_dropped_unless_none_is_wanted(keep: bool, dropped: int) -> None:
    metrics = Metrics()
    Recorder(metrics, RecentPredictions(), keep_novelties=keep).record(IMAGE, answer(novel=True), "id", 7, "robot")
    assert series(metrics.text().decode(), "openworld_novelties_dropped_total")[("no_inbox",)] == dropped
