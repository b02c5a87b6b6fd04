"""The writer never blocks, never raises, and reports every sighting once."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from models.errors import StoreError
from models.files import sha256_bytes
from service.inbox import AddResult, DropReason, Inbox, InboxLimits, InboxWriter, Sighting
from tests.support.images import make_image
from tests.support.inbox import Clock, novelty_ids, sighting
from tests.support.waiting import wait_until

SECONDS = 60  # a test that waits this long has failed


class Reports:
    """What the writer reports of each sighting."""

    def __init__(self) -> None:
        self.added: list[AddResult] = []
        self.dropped: list[DropReason] = []

    @property
    def outcomes(self) -> list[str]:
        return [result.outcome for result in self.added]


class SlowInbox(Inbox):
    """`add` blocks until `release` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, InboxLimits())
        self.entered, self.release = threading.Event(), threading.Event()

    def add(self, sighting: Sighting) -> AddResult:
        self.entered.set()
        assert self.release.wait(SECONDS)
        return super().add(sighting)


class BrokenInbox(Inbox):
    def __init__(self, root: Path, error: Exception) -> None:
        super().__init__(root, InboxLimits())
        self.error = error

    def add(self, sighting: Sighting) -> AddResult:
        raise self.error


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    with contextlib.closing(Inbox(tmp_path, InboxLimits(burst=5), Clock())) as inbox:
        yield inbox


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowInbox]:
    with contextlib.closing(SlowInbox(tmp_path)) as inbox:
        yield inbox
        inbox.release.set()


def writer_of(inbox: Inbox, reports: Reports, **options: int | Clock) -> InboxWriter:
    return InboxWriter(inbox, on_added=reports.added.append, on_drop=reports.dropped.append, **options)  # type: ignore


def test_every_offered_sighting_is_added_or_reported_as_dropped(inbox: Inbox, reports: Reports) -> None:
    writer = writer_of(inbox, reports)
    for data in (make_image(1), make_image(2), make_image(1), b"not an image", *(make_image(n) for n in range(3, 8))):
        assert writer.offer(sighting(data))
    assert writer.flush(SECONDS)
    assert reports.outcomes == ["new", "new", "folded", "new", "new", "new"]
    assert reports.dropped == ["unreadable", "rate", "rate"]
    assert inbox.counts()["new"] == 5
    assert writer.close(SECONDS)


def test_a_full_queue_drops_without_waiting(slow: SlowInbox, reports: Reports) -> None:
    writer = writer_of(slow, reports, max_sightings=3)
    assert writer.offer(sighting(make_image(0)))
    assert slow.entered.wait(SECONDS)
    # The inbox is busy until `release`: an offer that waits for it does not return.
    assert [writer.offer(sighting(make_image(n))) for n in range(1, 100)] == [True] * 3 + [False] * 96
    assert reports.dropped == ["queue"] * 96
    assert not writer.flush(0.01)
    slow.release.set()
    assert writer.close(SECONDS)
    assert reports.outcomes == ["new"] * 4


def test_the_byte_bound_includes_the_sighting_that_is_being_added(slow: SlowInbox, reports: Reports) -> None:
    data = make_image(0)
    writer = writer_of(slow, reports, max_bytes=3 * len(data))
    assert writer.offer(sighting(data))
    assert slow.entered.wait(SECONDS)
    assert [writer.offer(sighting(data)) for _ in range(4)] == [True, True, False, False]
    slow.release.set()
    assert writer.flush(SECONDS)
    assert [writer.offer(sighting(data)) for _ in range(1)] == [True]  # there is room again
    assert writer.close(SECONDS)
    assert reports.outcomes == ["new", "folded", "folded", "folded"]


def test_errors_are_counted_and_logged_once_per_minute(
    tmp_path: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    inbox = BrokenInbox(tmp_path, StoreError("the disk is full: make room"))
    writer = writer_of(inbox, reports, clock=clock)
    with caplog.at_level(logging.ERROR):
        for n in range(5):
            assert writer.offer(sighting(make_image(n)))
        assert writer.flush(SECONDS)
        clock.now += 61
        assert writer.offer(sighting(make_image(9)))
        assert writer.close(SECONDS)
    assert reports.dropped == ["error"] * 6
    first, second = (record.getMessage() for record in caplog.records)
    assert "the disk is full: make room" in first
    assert "4 more" in second
    assert caplog.records[0].exc_info is None


def test_a_bug_is_logged_with_its_traceback_and_the_writer_continues(
    tmp_path: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    writer = writer_of(BrokenInbox(tmp_path, KeyError("a bug")), reports)
    for n in range(3):
        assert writer.offer(sighting(make_image(n)))
    assert writer.close(SECONDS)
    assert reports.dropped == ["error"] * 3
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_wrong_sha256_drops_only_its_own_sighting(inbox: Inbox, reports: Reports) -> None:
    writer = writer_of(inbox, reports)
    assert writer.offer(replace(sighting(make_image(1)), sha256="0" * 64))
    assert writer.offer(sighting(make_image(2)))
    assert writer.close(SECONDS)
    assert (reports.dropped, reports.outcomes) == (["error"], ["new"])


def test_a_failing_callback_does_not_stop_the_writer(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    def broken(value: object) -> None:
        raise RuntimeError("the metric is gone")

    writer = InboxWriter(inbox, on_added=broken, on_drop=broken)
    for data in (make_image(1), b"not an image", make_image(2)):
        assert writer.offer(sighting(data))
    assert writer.close(SECONDS)
    assert not writer.offer(sighting(make_image(3)))
    assert inbox.counts()["new"] == 2
    assert "the metric is gone" in caplog.text


def test_close_adds_the_queued_sightings_and_accepts_no_more(inbox: Inbox, reports: Reports) -> None:
    writer = writer_of(inbox, reports)
    for n in range(5):
        assert writer.offer(sighting(make_image(n)))
    assert writer.close(SECONDS)
    assert reports.outcomes == ["new"] * 5
    assert not writer.offer(sighting(make_image(9)))
    assert reports.dropped == ["queue"]
    assert writer.close(SECONDS)  # closing twice is no error


def test_close_drops_and_reports_the_rest_after_its_timeout(slow: SlowInbox, reports: Reports) -> None:
    writer = writer_of(slow, reports)
    for n in range(4):
        assert writer.offer(sighting(make_image(n)))
    assert slow.entered.wait(SECONDS)
    assert not writer.close(0.05)
    assert reports.dropped == ["queue"] * 3
    slow.release.set()
    assert writer.flush(SECONDS)
    assert reports.outcomes == ["new"]


def test_a_closed_inbox_is_reported_as_an_error(inbox: Inbox, reports: Reports) -> None:
    writer = writer_of(inbox, reports)
    inbox.close()
    assert writer.offer(sighting(make_image(1)))
    assert writer.close(SECONDS)
    assert reports.dropped == ["error"]


def test_the_writer_sweeps_old_novelties(tmp_path: Path, reports: Reports) -> None:
    clock = Clock()
    with contextlib.closing(Inbox(tmp_path, InboxLimits(max_age_seconds=100), clock)) as inbox:
        writer = writer_of(inbox, reports, clock=clock)
        assert writer.offer(sighting(make_image(1)))
        assert writer.flush(SECONDS)
        clock.now += 101
        # Dropped, so that `add` does not remove the old novelty.
        assert writer.offer(sighting(b"not an image"))
        assert writer.close(SECONDS)
        assert inbox.counts()["new"] == 0


def test_many_threads_may_offer_concurrently(inbox: Inbox, reports: Reports) -> None:
    writer = writer_of(inbox, reports, max_sightings=8)
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
    assert len(reports.added) + len(reports.dropped) == 200
    assert sum(item.count for item in inbox.list().items) == len(reports.added)


def test_an_erased_image_is_neither_queued_nor_added_any_more(slow: SlowInbox, reports: Reports) -> None:
    writer = writer_of(slow, reports)
    erased, other = make_image(1), make_image(2)
    assert writer.offer(sighting(erased))
    assert slow.entered.wait(SECONDS)  # this one is being added
    for data in (erased, other, erased):
        assert writer.offer(sighting(data))
    discarding = threading.Thread(target=writer.discard, args=([sha256_bytes(erased)], SECONDS))
    discarding.start()
    wait_until(lambda: reports.dropped or len(writer._queue) == 1)
    slow.release.set()
    discarding.join(SECONDS)
    slow.delete([sha256_bytes(erased)])
    assert writer.flush(SECONDS)
    assert reports.dropped == ["erased"] * 2
    assert novelty_ids(slow) == {sha256_bytes(other)}
    assert writer.close(SECONDS)
