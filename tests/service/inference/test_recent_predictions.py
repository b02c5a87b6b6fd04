"""Recent predictions are bounded, and the predictions of an image can be erased."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.files import sha256_bytes
from service.inbox import Sighting
from service.inference.recent_predictions import OVERHEAD, RecentPredictions


def prediction(number: int, size: int = 100, dimensions: int | None = None, data: bytes | None = None) -> Sighting:
    return Sighting(
        data=data if data is not None else number.to_bytes(4, "big").ljust(size, b"."),
        prediction_id=f"prediction-{number}",
        version=1,
        score=0.5,
        calibrated_score=0.5,
        p_novel=0.5,
        nearest=[],
        client="robot",
        embedding=None if dimensions is None else np.zeros(dimensions, np.float32),
    )


def numbers(recent: RecentPredictions) -> list[int]:
    return [n for n in range(100) if recent.get(f"prediction-{n}") is not None]


def test_a_prediction_is_found_by_its_id() -> None:
    recent = RecentPredictions()
    recent.put(prediction(1))
    assert recent.get("prediction-1") == prediction(1)
    assert recent.get("prediction-2") is None


def test_above_the_count_limit_the_oldest_are_removed() -> None:
    recent = RecentPredictions(max_count=3)
    for number in range(5):
        recent.put(prediction(number))
    assert numbers(recent) == [2, 3, 4]


def test_above_the_byte_limit_the_oldest_are_removed() -> None:
    recent = RecentPredictions(max_bytes=3 * (100 + OVERHEAD))
    for number in range(5):
        recent.put(prediction(number))
    assert numbers(recent) == [2, 3, 4]
    recent.put(prediction(5, size=200 + OVERHEAD))
    assert numbers(recent) == [4, 5]


def test_a_prediction_above_the_byte_limit_is_not_kept_and_removes_no_other() -> None:
    recent = RecentPredictions(max_bytes=3 * (100 + OVERHEAD))
    recent.put(prediction(1))
    recent.put(prediction(2, size=10_000))
    assert numbers(recent) == [1]


def test_embeddings_count_towards_the_byte_limit() -> None:
    recent = RecentPredictions(max_bytes=100 + OVERHEAD + 4 * 1280)
    recent.put(prediction(1, dimensions=1280))
    recent.put(prediction(2, dimensions=1280))
    assert numbers(recent) == [2]


@pytest.mark.parametrize("recent", [RecentPredictions(max_bytes=0), RecentPredictions(max_count=0)])
def test_with_a_limit_of_zero_nothing_is_kept(recent: RecentPredictions) -> None:
    recent.put(prediction(1))
    assert len(recent) == recent._sightings.currsize == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(4, 3000)), max_size=60), st.integers(0, 8000))
def test_the_bounds_hold_after_any_sequence_of_predictions(puts: list[tuple[int, int]], room: int) -> None:
    recent = RecentPredictions(max_bytes=room, max_count=4)
    for number, size in puts:
        recent.put(prediction(number, size))
        assert len(recent) <= 4
        assert recent._sightings.currsize == sum(len(one.data) + OVERHEAD for one in recent._sightings.values()) <= room
        if size + OVERHEAD <= room:
            found = recent.get(f"prediction-{number}")
            assert found is not None
            assert len(found.data) == size


def test_every_prediction_of_a_removed_image_is_removed() -> None:
    recent = RecentPredictions()
    for number in range(6):
        recent.put(prediction(number, data=b"the same" if number % 2 else None))
    assert asyncio.run(recent.erase({sha256_bytes(b"the same"), "0" * 64})) == 3
    assert numbers(recent) == [0, 2, 4]
    assert recent._sightings.currsize == 3 * (100 + OVERHEAD)
