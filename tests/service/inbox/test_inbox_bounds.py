"""Count, bytes, age and rate of the inbox are bounded."""

import contextlib
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from models.files import sha256_bytes
from models.images import ImageLimits
from service.inbox import Inbox, InboxLimits
from service.inbox.index import NoveltyIndex, SimilarityGroups
from service.settings import ServiceSettings
from tests.support.images import make_image
from tests.support.inbox import Clock, check_consistent, image_files, novelty_ids, open_inbox, sighting


def test_a_full_inbox_evicts_novelties_that_are_not_new_and_then_the_longest_unseen(
    tmp_path: Path, clock: Clock
) -> None:
    limits = InboxLimits(max_count=4)
    with contextlib.closing(Inbox(tmp_path, limits, clock)) as inbox:
        a, b, c, d, e, f, g = (make_image(n) for n in range(7))
        for data in (a, b, c, d):
            clock.now += 1
            inbox.add(sighting(data))
        clock.now += 1
        inbox.add(sighting(a))  # seen again, so b is the longest unseen
        inbox.set_state([sha256_bytes(c)], "labelled")
        inbox.set_state([sha256_bytes(d)], "dismissed")
        left = []
        for data in (e, f, g):
            clock.now += 1
            assert inbox.add(sighting(data)).outcome == "new"
            check_consistent(inbox, tmp_path, limits)
            left.append(novelty_ids(inbox))
    expected = ([a, b, d, e], [a, b, e, f], [a, e, f, g])
    assert left == [{sha256_bytes(data) for data in some} for some in expected]


def test_bytes_are_bounded_and_an_image_above_the_bound_is_dropped(tmp_path: Path) -> None:
    images = [make_image(n, (40, 40 + n)) for n in range(6)]
    limits = InboxLimits(max_bytes=sum(len(data) for data in images[:3]))
    with contextlib.closing(Inbox(tmp_path, limits, Clock())) as inbox:
        for data in images:
            assert inbox.add(sighting(data)).outcome == "new"
            check_consistent(inbox, tmp_path, limits)
        assert 1 <= inbox.counts()["new"] <= 3
        added = inbox.add(sighting(make_image(9, (200, 200))))
        assert (added.outcome, added.id, added.reason) == ("dropped", None, "too_large")


def test_an_image_above_the_pixel_limit_is_too_large(tmp_path: Path) -> None:
    with contextlib.closing(Inbox(tmp_path, image_limits=ImageLimits(max_pixels=100))) as inbox:
        assert inbox.add(sighting(make_image(1))).reason == "too_large"


def test_sweep_removes_novelties_above_the_age_limit(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock, max_age_seconds=100) as inbox:
        for n in range(3):
            inbox.add(sighting(make_image(n)))
        clock.now += 90
        inbox.add(sighting(make_image(0)))
        assert inbox.sweep() == 0
        clock.now += 20
        assert inbox.sweep() == 2
        assert novelty_ids(inbox) == set(image_files(tmp_path)) == {sha256_bytes(make_image(0))}


def test_age_is_bounded_without_a_sweep(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock, max_age_seconds=100) as inbox:
        inbox.add(sighting(make_image(1)))
        clock.now += 101
        inbox.add(sighting(make_image(2)))
        assert novelty_ids(inbox) == {sha256_bytes(make_image(2))}


def test_the_rate_bounds_new_novelties_and_not_folded_ones(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock, rate=2, burst=3) as inbox:
        assert [inbox.add(sighting(make_image(n))).reason for n in range(5)] == [None, None, None, "rate", "rate"]
        assert [inbox.add(sighting(make_image(0))).outcome for _ in range(5)] == ["folded"] * 5
        clock.now += 0.5
        assert [inbox.add(sighting(make_image(n))).reason for n in (3, 4)] == [None, "rate"]
        clock.now -= 1000  # a clock that is set back does not block for as long
        assert inbox.add(sighting(make_image(4))).reason == "rate"
        clock.now += 0.5
        assert [inbox.add(sighting(make_image(n))).reason for n in (4, 5)] == [None, "rate"]
        clock.now += 3600
        assert [inbox.add(sighting(make_image(n))).reason for n in range(5, 9)] == [None, None, None, "rate"]


IMAGES = [make_image(n, (8 + 4 * n, 8)) for n in range(10)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["labelled", "dismissed", "delete"]), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(1, 60)),
        st.tuples(st.just("reopen"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.integers(1, 4), st.integers(500, 4000))
def test_the_bounds_hold_after_any_sequence_of_calls(steps: list[tuple[str, int]], count: int, size: int) -> None:
    clock, limits = Clock(), InboxLimits(max_count=count, max_bytes=size, max_age_seconds=100, burst=10)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        inbox = Inbox(root, limits, clock)
        for step, value in steps:
            id = sha256_bytes(IMAGES[value]) if value < len(IMAGES) else ""
            if step == "add":
                inbox.add(sighting(IMAGES[value]))
            elif step == "wait":
                clock.now += value
            elif step == "delete":
                exists = id in novelty_ids(inbox)
                assert inbox.delete([id]) == exists
            elif step == "reopen":
                inbox.close()
                inbox = Inbox(root, limits, clock)
            else:
                inbox.set_state([id], "labelled" if step == "labelled" else "dismissed")
            check_consistent(inbox, root, limits)
        inbox.close()


@pytest.mark.parametrize(
    "limits",
    [{"max_count": 0}, {"max_bytes": 0}, {"burst": 0}, {"rate": 0}, {"max_age_seconds": -1}, {"fold_bits": 65}],
)
def test_invalid_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        InboxLimits(**limits)


def test_the_number_of_novelties_has_an_upper_bound(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="less than or equal to 100000"):
        ServiceSettings(data=tmp_path, inbox_count=100_001)


@pytest.mark.parametrize("rows", [NoveltyIndex, SimilarityGroups])
def test_without_memory_for_longer_embeddings_a_sighting_leaves_nothing(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: type
) -> None:
    def refuse(self: object, width: int) -> None:
        raise MemoryError

    inbox.add(sighting(make_image(1)))
    with monkeypatch.context() as patch:
        patch.setattr(rows, "_widen", refuse)
        with pytest.raises(MemoryError):
            inbox.add(sighting(make_image(2), embedding=[1, 0]))
    check_consistent(inbox, tmp_path, InboxLimits())
    assert len(inbox.groups().items) == 1
    assert inbox.add(sighting(make_image(2), embedding=[1, 0])).outcome == "new"
    check_consistent(inbox, tmp_path, InboxLimits())


@pytest.mark.parametrize("jump", [31 * 86400.0, -31 * 86400.0])
def test_a_clock_that_is_set_removes_nothing(tmp_path: Path, clock: Clock, jump: float) -> None:
    """Also one that is wrong when the inbox is opened again, as on a board without a battery."""
    wall = Clock()
    limits = InboxLimits(max_age_seconds=30 * 86400)
    for start in (0, 3):
        with contextlib.closing(Inbox(tmp_path, limits, clock, wall_clock=wall)) as inbox:
            inbox.add(sighting(make_image(start)))
            wall.now += jump
            assert inbox.sweep() == 0
            inbox.add(sighting(make_image(start + 1)))
            assert sum(inbox.counts().values()) == start // 3 * 2 + 2
            clock.now += 16 * 86400  # in total 32 days, in two processes
    with contextlib.closing(Inbox(tmp_path, limits, clock, wall_clock=wall)) as inbox:
        assert inbox.sweep() == 2
        assert sum(inbox.counts().values()) == 2


def test_an_inbox_of_schema_2_keeps_its_novelties_and_their_order_of_age(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock, max_age_seconds=100) as inbox:
        inbox.add(sighting(make_image(0)))
        clock.now += 60
        inbox.add(sighting(make_image(1)))
    with contextlib.closing(sqlite3.connect(tmp_path / "inbox" / "inbox.sqlite3")) as old:
        old.executescript(
            "DROP INDEX novelties_aged; ALTER TABLE novelties DROP COLUMN ran; DROP TABLE running;"
            "CREATE INDEX novelties_aged ON novelties (last_seen); PRAGMA user_version = 2;"
        )
    with open_inbox(tmp_path, clock, max_age_seconds=100) as inbox:
        assert sum(inbox.counts().values()) == 2
        clock.now += 50
        assert inbox.sweep() == 1
        assert novelty_ids(inbox) == {sha256_bytes(make_image(1))}


def test_a_novelty_is_not_kept_longer_than_promised_even_if_it_is_seen_again(tmp_path: Path, clock: Clock) -> None:
    first, second = make_image(1), make_image(2)
    with open_inbox(tmp_path, clock, max_kept_seconds=100.0) as inbox:
        inbox.add(sighting(first))
        clock.now += 60
        inbox.add(sighting(first))
        inbox.add(sighting(second))
    clock.now += 50  # while no server runs
    with open_inbox(tmp_path, clock, max_kept_seconds=100.0) as inbox:
        assert inbox.sweep() == 1
        assert novelty_ids(inbox) == {sha256_bytes(second)}
        assert image_files(tmp_path).keys() == {sha256_bytes(second)}
