"""The writer never blocks and never raises, and accounts for every sighting."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from models.errors import StoreError
from service.inbox import DropReason, Inbox, InboxLimits, InboxWriter, Kept, Sighting
from tests.service.inbox.test_inbox import Clock, sighting
from tests.support.images import make_image

SECONDS = 10  # longer than anything here takes; a test that waits so long has failed


class Account:
    """What the writer said of each sighting."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.dropped: list[DropReason] = []

    @property
    def outcomes(self) -> list[str]:
        return [kept.outcome for kept in self.kept]


class SlowInbox(Inbox):
    """Its disk does not answer until `release` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, InboxLimits())
        self.entered, self.release = threading.Event(), threading.Event()

    def add(self, sighting: Sighting) -> Kept:
        self.entered.set()
        assert self.release.wait(SECONDS)
        return super().add(sighting)


class BrokenInbox(Inbox):
    def __init__(self, root: Path, error: Exception) -> None:
        super().__init__(root, InboxLimits())
        self.error = error

    def add(self, sighting: Sighting) -> Kept:
        raise self.error


@pytest.fixture
def account() -> Account:
    return Account()


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    with contextlib.closing(Inbox(tmp_path, InboxLimits(burst=5), Clock())) as inbox:
        yield inbox


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowInbox]:
    with contextlib.closing(SlowInbox(tmp_path)) as inbox:
        yield inbox
        inbox.release.set()


def writer_of(inbox: Inbox, account: Account, **options: int | Clock) -> InboxWriter:
    return InboxWriter(inbox, on_kept=account.kept.append, on_drop=account.dropped.append, **options)  # type: ignore


def test_what_is_offered_is_in_the_inbox_and_accounted_for(inbox: Inbox, account: Account) -> None:
    writer = writer_of(inbox, account)
    for data in (make_image(1), make_image(2), make_image(1), b"not a picture", *(make_image(n) for n in range(3, 8))):
        assert writer.offer(sighting(data))
    assert writer.flush(SECONDS)
    assert account.outcomes == ["new", "new", "folded", "new", "new", "new"]
    assert account.dropped == ["unreadable", "rate", "rate"]
    assert inbox.counts()["new"] == 5
    assert writer.close(SECONDS)


def test_a_full_queue_drops_at_once_and_waits_for_nothing(slow: SlowInbox, account: Account) -> None:
    writer = writer_of(slow, account, max_sightings=3)
    assert writer.offer(sighting(make_image(0)))
    assert slow.entered.wait(SECONDS)
    started = time.monotonic()
    assert [writer.offer(sighting(make_image(n))) for n in range(1, 100)] == [True] * 3 + [False] * 96
    assert time.monotonic() - started < 1
    assert account.dropped == ["queue"] * 96
    assert not writer.flush(0.01)
    slow.release.set()
    assert writer.close(SECONDS)
    assert account.outcomes == ["new"] * 4


def test_the_queue_is_bounded_in_bytes_with_the_one_being_added(slow: SlowInbox, account: Account) -> None:
    data = make_image(0)
    writer = writer_of(slow, account, max_bytes=3 * len(data))
    assert writer.offer(sighting(data))
    assert slow.entered.wait(SECONDS)
    assert [writer.offer(sighting(data)) for _ in range(4)] == [True, True, False, False]
    slow.release.set()
    assert writer.flush(SECONDS)
    assert [writer.offer(sighting(data)) for _ in range(1)] == [True]  # the room is there again
    assert writer.close(SECONDS)
    assert account.outcomes == ["new", "folded", "folded", "folded"]


def test_errors_are_counted_and_logged_once_a_minute(
    tmp_path: Path, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    inbox = BrokenInbox(tmp_path, StoreError("the disk is full: make room"))
    writer = writer_of(inbox, account, clock=clock)
    with caplog.at_level(logging.ERROR):
        for n in range(5):
            assert writer.offer(sighting(make_image(n)))
        assert writer.flush(SECONDS)
        clock.now += 61
        assert writer.offer(sighting(make_image(9)))
        assert writer.close(SECONDS)
    assert account.dropped == ["error"] * 6
    first, second = (record.getMessage() for record in caplog.records)
    assert "the disk is full: make room" in first
    assert "4 more" in second
    assert caplog.records[0].exc_info is None


def test_a_bug_is_logged_with_its_traceback_and_the_writer_goes_on(
    tmp_path: Path, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    writer = writer_of(BrokenInbox(tmp_path, KeyError("a bug")), account)
    for n in range(3):
        assert writer.offer(sighting(make_image(n)))
    assert writer.close(SECONDS)
    assert account.dropped == ["error"] * 3
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_wrong_sha256_costs_only_itself(inbox: Inbox, account: Account) -> None:
    writer = writer_of(inbox, account)
    assert writer.offer(replace(sighting(make_image(1)), sha256="0" * 64))
    assert writer.offer(sighting(make_image(2)))
    assert writer.close(SECONDS)
    assert (account.dropped, account.outcomes) == (["error"], ["new"])


def test_a_callback_that_fails_stops_nothing(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    def broken(value: object) -> None:
        raise RuntimeError("the metric is gone")

    writer = InboxWriter(inbox, on_kept=broken, on_drop=broken)
    for data in (make_image(1), b"not a picture", make_image(2)):
        assert writer.offer(sighting(data))
    assert writer.close(SECONDS)
    assert not writer.offer(sighting(make_image(3)))
    assert inbox.counts()["new"] == 2
    assert "the metric is gone" in caplog.text


def test_closing_adds_what_is_queued_and_takes_nothing_more(inbox: Inbox, account: Account) -> None:
    writer = writer_of(inbox, account)
    for n in range(5):
        assert writer.offer(sighting(make_image(n)))
    assert writer.close(SECONDS)
    assert account.outcomes == ["new"] * 5
    assert not writer.offer(sighting(make_image(9)))
    assert account.dropped == ["queue"]
    assert writer.close(SECONDS)  # a second time is no error


def test_closing_gives_up_after_its_time_and_accounts_for_the_rest(slow: SlowInbox, account: Account) -> None:
    writer = writer_of(slow, account)
    for n in range(4):
        assert writer.offer(sighting(make_image(n)))
    assert slow.entered.wait(SECONDS)
    assert not writer.close(0.05)
    assert account.dropped == ["queue"] * 3
    slow.release.set()
    assert writer.flush(SECONDS)
    assert account.outcomes == ["new"]


def test_an_inbox_that_is_closed_first_is_counted_as_an_error(inbox: Inbox, account: Account) -> None:
    writer = writer_of(inbox, account)
    inbox.close()
    assert writer.offer(sighting(make_image(1)))
    assert writer.close(SECONDS)
    assert account.dropped == ["error"]


def test_the_writer_sweeps_what_has_aged_out(tmp_path: Path, account: Account) -> None:
    clock = Clock()
    with contextlib.closing(Inbox(tmp_path, InboxLimits(max_age_seconds=100), clock)) as inbox:
        writer = writer_of(inbox, account, clock=clock)
        assert writer.offer(sighting(make_image(1)))
        assert writer.flush(SECONDS)
        clock.now += 101
        # Not kept, so it is not adding that sweeps.
        assert writer.offer(sighting(b"not a picture"))
        assert writer.close(SECONDS)
        assert inbox.counts()["new"] == 0


def test_many_threads_may_offer_at_once(inbox: Inbox, account: Account) -> None:
    writer = writer_of(inbox, account, max_sightings=8)
    offered = threading.Barrier(4)

    def offer() -> None:
        offered.wait(SECONDS)
        for n in range(50):
            writer.offer(sighting(make_image(n % 4)))

    threads = [threading.Thread(target=offer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(SECONDS)
    assert len(account.kept) + len(account.dropped) == 200
    assert sum(item.count for item in inbox.list().items) == len(account.kept)
