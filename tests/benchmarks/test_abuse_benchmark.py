"""The abuse benchmark: its bombs are what they claim, and its bars notice what they should."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest

from benchmarks.abuse import attacks
from benchmarks.abuse.__main__ import _bars
from models.images import MAX_PIXELS


def a_round(memory: float, p99: float = 40.0, **statuses: int) -> dict[str, Any]:
    return {"attacks": {"slowloris": {"p99_ms": p99, "statuses": statuses}}, "memory_mib": memory}


@pytest.mark.parametrize(
    ("second", "unmet"),
    [
        (a_round(314.0, 100.0, **{"200": 9}), []),
        (a_round(314.0, **{"200": 9, "429": 1}), ["slowloris, round 2: only 2xx"]),
        (a_round(314.0, 101.0, **{"200": 9}), ["slowloris, round 2: p99 within 100 ms"]),
        (a_round(316.0, **{"200": 9}), ["memory after round 2 within 1.05 of that after round 1"]),
    ],
)
def test_the_bars_notice_errors_slow_answers_and_growth(second: dict[str, Any], unmet: list[str]) -> None:
    bars = _bars({"p99_ms": 20.0}, [a_round(300.0, **{"200": 9}), second])
    assert [bar["bar"] for bar in bars if not bar["met"]] == unmet


def test_a_bomb_is_an_image_within_the_limits() -> None:
    assert attacks.BOMB_SIDE**2 < MAX_PIXELS


def test_the_zip_of_many_members_is_a_zip() -> None:
    assert zipfile.is_zipfile(io.BytesIO(attacks.many_members()))
