"""Limits of requests: rates per key, permits, and deadlines."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from service.errors import ClientDisconnected, DeadlinePassed, KeyBusy, Overloaded, RateLimited
from service.http.limits import (
    BURST_SECONDS,
    MAX_RETRY_AFTER,
    NOTHING,
    Admission,
    Permit,
    Quota,
    RateLimiter,
    RequestLimits,
    finish_by,
    finish_while_connected,
)
from tests.support.servers import known_image, learned_folder, running_server

# Rates

ROBOT, OTHER = "robot", "other"


def test_a_key_that_exceeds_its_rate_is_refused_and_others_are_not(tmp_path: Path) -> None:
    secrets = "ffffffff-secret-of-fast", "ssssssss-secret-of-slow"
    keys = f"fast:predict:{secrets[0]},slow:predict:{secrets[1]}"
    settings = {"rate_limit": 0.01, "max_request_images": 3, "threads": 1, "inbox": "false"}
    with running_server(learned_folder(tmp_path / "robot"), keys=keys, **settings) as server:
        fast, slow = ({"X-API-Key": secret} for secret in secrets)
        image = known_image("class 0")
        assert [server.post("/predict", content=image, headers=fast).status_code for _ in range(3)] == [200] * 3
        refused = server.post("/predict", content=image, headers=fast)
        assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        assert 1 <= int(refused.headers["retry-after"]) <= 100  # for the next image; the bucket fills slowly here
        assert "fast" in refused.json()["detail"]
        assert server.post("/predict", content=image, headers=slow).status_code == 200
        assert server.metric("openworld_rejected_total", reason="rate_limited") == 1
        assert server.get("/versions", headers=fast).status_code == 200  # only images are counted


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_holds_two_seconds_worth_and_fills_at_its_rate() -> None:
    clock = Clock()
    limiter = RateLimiter(10, 1, clock)
    limiter.take(ROBOT, 20)
    with pytest.raises(RateLimited) as found:
        limiter.take(ROBOT, 1)
    assert found.value.retry_after == pytest.approx(0.1)
    limiter.take(OTHER, 20)  # another key has its own bucket
    clock.now += 0.55
    limiter.take(ROBOT, 5)
    with pytest.raises(RateLimited):
        limiter.take(ROBOT, 1)
    clock.now += 3600
    limiter.take(ROBOT, 20)  # the burst, however long the pause was
    with pytest.raises(RateLimited):
        limiter.take(ROBOT, 1)


def test_the_largest_request_always_fits_a_full_bucket() -> None:
    limiter = RateLimiter(0.1, 64, Clock())
    limiter.take(ROBOT, 64)
    with pytest.raises(RateLimited) as found:
        limiter.take(ROBOT, 64)
    assert found.value.retry_after == pytest.approx(640)


def test_no_rate_is_no_limit() -> None:
    limiter = RateLimiter(0, 1, Clock())
    for _ in range(100):
        limiter.take(ROBOT, 1000)


@given(
    rate=st.floats(0.1, 100),
    requests=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 64)), max_size=60),
)
def test_a_client_that_waits_as_told_is_served_and_never_exceeds_the_rate(
    rate: float, requests: list[tuple[float, int]]
) -> None:
    clock, taken = Clock(), 0
    limiter = RateLimiter(rate, 64, clock)
    for pause, images in requests:
        clock.now += pause
        try:
            limiter.take(ROBOT, images)
        except RateLimited as error:
            clock.now += error.retry_after + 1e-6
            limiter.take(ROBOT, images)
        taken += images
    assert taken <= max(rate * BURST_SECONDS, 64) + (clock.now - Clock.now) * rate + 1e-3


# Permits


def admission_of(images: int, size: int, seconds_per_image: float, per_key: Quota | None = None) -> Admission:
    limit = Quota(images, size)
    return Admission(limit, per_key or limit, lambda: seconds_per_image)


def test_one_key_cannot_take_all_permits_or_bytes() -> None:
    admission = admission_of(8, 1000, 0.5, per_key=Quota(2, 400))
    with admission.enter(ROBOT) as first, admission.enter(ROBOT):
        with pytest.raises(KeyBusy) as found:
            admission.enter(ROBOT)
        assert found.value.retry_after == 1.0
        with pytest.raises(KeyBusy):
            first.grow(size=401)
        with admission.enter(OTHER) as other:
            other.grow(images=1, size=400)
            assert admission.in_use == Quota(4, 400)
    assert admission.in_use == NOTHING
    with admission.enter(ROBOT) as again:
        again.grow(images=1, size=400)


def test_a_permit_releases_everything_after_an_exception() -> None:
    admission = admission_of(4, 1000, 0.5)

    def failing_request() -> None:
        with admission.enter(ROBOT) as permit:
            permit.grow(images=2, size=900)
            assert admission.in_use == Quota(3, 900)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_request()
    assert admission.in_use == NOTHING


def test_a_refused_request_reserves_nothing_and_is_told_when_to_retry() -> None:
    admission = admission_of(3, 1000, 0.5)  # admits two requests, one of which may grow to two images
    with admission.enter(ROBOT) as first, admission.enter(ROBOT):
        with pytest.raises(Overloaded) as found:
            admission.enter(ROBOT)
        assert found.value.retry_after == 1.0  # two images, half a second each
        with pytest.raises(Overloaded):
            first.grow(size=1001)
        assert admission.in_use == Quota(2, 0)
    assert admission.in_use == NOTHING


def test_the_estimated_retry_after_is_capped() -> None:
    admission = admission_of(1, 1000, 3600.0)
    with admission.enter(ROBOT), pytest.raises(Overloaded) as found:
        admission.enter(ROBOT)
    assert found.value.retry_after == MAX_RETRY_AFTER


STEP = st.one_of(
    st.just(("enter", 0, 0)),
    st.tuples(st.just("grow"), st.integers(0, 5), st.integers(0, 400)),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("leave twice"), st.integers(0, 9), st.just(0)),
)


@given(steps=st.lists(STEP, max_size=80))
def test_permits_never_leak(steps: list[tuple[str, int, int]]) -> None:
    admission, permits = admission_of(8, 1000, 0.1), list[Permit]()
    for step, number, size in steps:
        try:
            if step == "enter":
                permits.append(admission.enter(ROBOT))
            elif step == "grow" and permits:
                permits[number % len(permits)].grow(images=number, size=size)
            elif permits:
                permit = permits.pop(number % len(permits))
                for _ in range(2 if step == "leave twice" else 1):
                    permit.__exit__(None, None, None)
        except Overloaded:
            pass
        assert len(permits) <= admission.in_use.images <= 8
        assert 0 <= admission.in_use.bytes <= 1000
    for permit in permits:
        permit.__exit__(None, None, None)
    assert admission.in_use == NOTHING


# Deadlines


def test_a_request_may_shorten_or_lengthen_its_deadline_up_to_the_limit() -> None:
    limits = RequestLimits(body=1, images=1, image=1, timeout=10, max_timeout=60)
    for asked, seconds in ((None, 10), (1, 1), (30, 30), (61, 60)):
        before = time.monotonic()
        assert before + seconds <= limits.deadline(asked) <= time.monotonic() + seconds


class Work:
    """Finishes after `seconds`, and records whether it was cancelled."""

    cancelled = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def run(self) -> str:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "done"


def connection(disconnects_after: float) -> Request:
    async def receive() -> Message:
        await asyncio.sleep(disconnects_after)
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


def test_work_that_finishes_in_time_returns_its_result() -> None:
    async def run() -> None:
        assert await finish_by(soon(), Work(0).run()) == "done"
        assert await finish_while_connected(connection(30), soon(), Work(0).run()) == "done"

    asyncio.run(run())


def test_work_is_cancelled_at_the_deadline() -> None:
    async def run() -> None:
        first, second = Work(30), Work(30)
        with pytest.raises(DeadlinePassed):
            await finish_by(soon(0.02), first.run())
        with pytest.raises(DeadlinePassed):
            await finish_while_connected(connection(30), soon(0.02), second.run())
        assert first.cancelled
        assert second.cancelled

    asyncio.run(run())


def test_work_is_cancelled_when_the_client_disconnects() -> None:
    async def run() -> None:
        work = Work(30)
        with pytest.raises(ClientDisconnected):
            await finish_while_connected(connection(0.02), soon(), work.run())
        assert work.cancelled

    asyncio.run(run())
