"""Recent predictions that servers share through Redis: found by all, bounded, and erased for all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import redis

from models.files import sha256_bytes
from service.inbox import Sighting
from service.inference import shared_predictions
from service.inference.shared_predictions import SharedPredictions
from service.shared import RedisState, pack_sighting, unpack_sighting
from tasks.errors import QueueUnavailable
from tests.service.inference.test_recent_predictions import numbers, prediction
from tests.support.redis_servers import PREFIX
from tests.support.waiting import wait_until


@contextmanager
def two_servers(
    redis_state: RedisState, max_bytes: int = 2**20, seconds: float = 60
) -> Iterator[tuple[SharedPredictions, SharedPredictions]]:
    with (
        closing(SharedPredictions(redis_state, max_bytes, seconds)) as one,
        closing(SharedPredictions(redis_state, max_bytes, seconds)) as other,
    ):
        yield one, other


def kept(redis_state: RedisState) -> tuple[int, int]:
    """(number of predictions in Redis, their bytes as counted)"""
    bytes_ = redis_state.get("recent-bytes")
    return len(list(redis_state.client.scan_iter(f"{PREFIX}:recent:*"))), int(bytes_ or 0)


def make_older(redis_state: RedisState, id: str, seconds: float) -> None:
    """Make a prediction as old as if so many seconds had passed since it was put."""
    client, key, index = redis_state.client, f"{PREFIX}:recent:{id}", f"{PREFIX}:recent-index"
    [member] = [one for one in client.zrange(index, 0, -1) if one.startswith(f"{id} ".encode())]
    client.zincrby(index, -1000 * seconds, member)
    client.pexpire(key, max(1, client.pttl(key) - round(1000 * seconds)))


def test_another_server_finds_a_prediction_with_all_that_is_known_of_it(redis_state: RedisState) -> None:
    given = Sighting(
        data=b"\x00\xff image",
        prediction_id="prediction-1",
        version=7,
        score=None,
        calibrated_score=0.25,
        p_novel=0.75,
        nearest=[("äpfel", 0.5)],
        client="robot",
        embedding=np.arange(4, dtype=np.float32),
        label="äpfel",
    )
    with two_servers(redis_state) as (one, other):
        one.put(given)
        wait_until(lambda: other.get("prediction-1") is not None)
        found = other.get("prediction-1")
        assert found is not None
        assert found.sha256 == sha256_bytes(given.data)
        assert np.array_equal(found.embedding, given.embedding)  # type: ignore[arg-type]
        assert unpack_sighting(pack_sighting(given)) == given
        assert other.get("prediction-2") is None


def test_the_bytes_of_all_servers_are_bounded_and_the_oldest_go_first(redis_state: RedisState) -> None:
    size = len(pack_sighting(prediction(1, size=1000)))
    with two_servers(redis_state, max_bytes=4 * size) as (one, other):
        for number in range(10):
            (one, other)[number % 2].put(prediction(number, size=1000))
            wait_until(lambda number=number: redis_state.get(f"recent:prediction-{number}"))  # type: ignore[misc]
        with closing(SharedPredictions(redis_state, 4 * size, 60)) as third:
            assert numbers(third) == [7, 8, 9]  # each is larger in Redis, by its hash
        number_kept, bytes_kept = kept(redis_state)
        assert number_kept == 3
        assert bytes_kept <= 4 * size


def test_predictions_expire(redis_state: RedisState) -> None:
    with two_servers(redis_state, seconds=60) as (one, other):
        one.put(prediction(1))
        wait_until(lambda: other.get("prediction-1"))
        assert 0 < redis_state.client.pttl(f"{PREFIX}:recent:prediction-1") <= 60_000
        make_older(redis_state, "prediction-1", 60)
        wait_until(lambda: other.get("prediction-1") is None)
        one.put(prediction(2))
        wait_until(lambda: other.get("prediction-2"))
        assert kept(redis_state)[1] < 2 * len(pack_sighting(prediction(2))), "the expired one is not counted any more"


def test_an_erasure_reaches_redis_and_counts_the_bytes_down(redis_state: RedisState) -> None:
    with two_servers(redis_state) as (one, other):
        for number in range(3):
            one.put(prediction(number, data=b"same" if number < 2 else b"other"))
        # Directly after the predictions: those that wait to be copied are erased, too.
        assert asyncio.run(one.erase([sha256_bytes(b"same")])) == 2
        assert numbers(other) == [2]
        asyncio.run(other.erase([sha256_bytes(b"other")]))
        assert kept(redis_state) == (0, 0)


def test_a_server_whose_redis_does_not_answer_knows_its_own_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tasks.queue.connection.RESTART_SECONDS", 0.0)
    monkeypatch.setattr(shared_predictions, "MAX_WAITING", 150)
    with (
        closing(RedisState(f"unix://{tmp_path}/absent.sock", PREFIX)) as redis_state,
        closing(SharedPredictions(redis_state, 2**20, 60)) as recent,
    ):
        for number in range(5):
            recent.put(prediction(number))
        assert recent.get("prediction-4") == prediction(4)
        with pytest.raises(QueueUnavailable):
            recent.get("prediction-9")
        with pytest.raises(QueueUnavailable):
            asyncio.run(recent.erase([sha256_bytes(b"same")]))
    assert caplog.text.count("known to this server only") == 1


@pytest.mark.parametrize(
    ("answer", "repeated"),
    [
        (redis.ConnectionError("connection refused"), True),
        (redis.ResponseError("Background append only file rewriting already in progress"), True),
        (redis.ResponseError("NOPERM no permissions to run the 'bgrewriteaof' command"), False),
    ],
)
def test_an_erasure_is_repeated_until_redis_rewrites_its_file_unless_it_refuses(
    answer: redis.RedisError,
    repeated: bool,
    redis_state: RedisState,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise answer

    monkeypatch.setattr("tasks.queue.connection.RESTART_SECONDS", 0.0)
    monkeypatch.setattr("service.shared.redis_state.REWRITE_SECONDS", 0.0)
    monkeypatch.setattr(redis_state.client, "bgrewriteaof", fail)
    with closing(SharedPredictions(redis_state, 2**20, 60, rewrite=True)) as recent:
        with pytest.raises(QueueUnavailable) if repeated else nullcontext():
            asyncio.run(recent.erase([sha256_bytes(b"same")]))
        assert ("may contain images that were removed" in caplog.text) is not repeated
        monkeypatch.undo()
        asyncio.run(recent.erase([sha256_bytes(b"same")]))


def test_an_erasure_writes_no_file_of_a_redis_without_one(
    redis_state: RedisState, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(redis_state.client, "bgrewriteaof", lambda: calls.append("rewrite"))
    for enabled in (1, 0):
        monkeypatch.setattr(redis_state.client, "info", lambda section, enabled=enabled: {"aof_enabled": enabled})
        redis_state.rewrite_log()
    assert calls == ["rewrite"]


def test_a_prediction_above_the_limit_is_not_reported_as_a_failure_of_redis(
    redis_state: RedisState, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(SharedPredictions(redis_state, 0, 60)) as recent:
        recent.put(prediction(1))
        assert recent.get("prediction-1") is None
    assert caplog.text == ""
