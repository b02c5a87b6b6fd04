"""The inbox folds what is alike, stays within its bounds whatever arrives, and survives being killed."""

import contextlib
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from models.errors import StoreError
from models.files import sha256_bytes
from models.images import ImageLimits
from service.errors import NotFound
from service.inbox import STATES, Inbox, InboxLimits, Sighting
from service.inbox.index import LikenessIndex
from service.inbox.likeness import unit
from tests.service.inbox.test_likeness import COPIES, SHAPES, encode, scene
from tests.support.images import make_image
from tests.support.paths import ROOT


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def sighting(data: bytes, number: int = 0, embedding: Sequence[float] | None = None) -> Sighting:
    return Sighting(
        data=data,
        prediction_id=f"prediction-{number}",
        version=3,
        score=-1.5,
        calibrated_score=0.01,
        p_novel=0.75,
        nearest=[("apple", 0.5), ("pear", 0.25)],
        client="robot",
        embedding=None if embedding is None else np.array(embedding, dtype=np.float32),
    )


def files(root: Path) -> dict[str, int]:
    """Sizes by name of everything below the folder of images, temporaries as well."""
    return {path.name: path.stat().st_size for path in (root / "inbox" / "images").rglob("*") if path.is_file()}


def ids(inbox: Inbox) -> set[str]:
    return {item.id for state in STATES for item in inbox.list(state, limit=10_000).items}


def check(inbox: Inbox, root: Path, limits: InboxLimits) -> None:
    """The bounds hold, and rows, bytes and sums agree."""
    found = files(root)
    assert ids(inbox) == set(found)
    assert sum(inbox.counts().values()) == len(found) <= limits.max_count
    assert inbox.bytes_used == sum(found.values()) <= limits.max_bytes
    for id in found:
        assert sha256_bytes(inbox.read_image(id)) == id


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inbox(tmp_path: Path, clock: Clock) -> Iterator[Inbox]:
    with contextlib.closing(Inbox(tmp_path, InboxLimits(), clock)) as inbox:
        yield inbox


def open_inbox(root: Path, clock: Clock | None = None, **limits: float) -> contextlib.closing[Inbox]:
    return contextlib.closing(Inbox(root, InboxLimits(**limits), clock or Clock()))  # type: ignore[arg-type]


def test_a_novelty_comes_back_with_all_that_is_known_of_it(inbox: Inbox, clock: Clock) -> None:
    data = encode(scene(1))
    kept = inbox.add(sighting(data, embedding=[3, 4]))
    assert (kept.outcome, kept.id, kept.reason) == ("new", sha256_bytes(data), None)
    assert kept.id is not None
    found = inbox.get(kept.id)
    assert found is not None
    assert (found.first_seen, found.last_seen, found.count, found.state) == (clock.now, clock.now, 1, "new")
    assert (found.version, found.score, found.calibrated_score, found.p_novel) == (3, -1.5, 0.01, 0.75)
    assert found.nearest == [("apple", 0.5), ("pear", 0.25)]
    assert (found.prediction_id, found.client) == ("prediction-0", "robot")
    assert (found.bytes, found.width, found.height) == (len(data), 240, 180)
    assert found.embedding is not None
    np.testing.assert_allclose(found.embedding, [0.6, 0.8], atol=1e-3)
    assert inbox.read_image(kept.id) == data


def test_nothing_is_written_before_the_first_novelty(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        assert inbox.list().items == ()
        assert inbox.counts() == {"new": 0, "labelled": 0, "dismissed": 0}
        assert inbox.get("a" * 64) is None
        assert inbox.set_state(["a" * 64], "dismissed") == 0
        assert not inbox.delete("../outside")
        assert inbox.sweep() == inbox.bytes_used == 0
        with pytest.raises(NotFound):
            inbox.read_image("a" * 64)
        assert inbox.add(sighting(b"not a picture")).reason == "unreadable"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("orientation", [1, 6])
def test_the_size_is_that_of_the_upright_original(inbox: Inbox, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    kept = inbox.add(sighting(encode(scene(1, size=(1201, 800)), exif=exif)))
    found = inbox.get(kept.id or "")
    assert found is not None
    assert (found.width, found.height) == ((1201, 800) if orientation == 1 else (800, 1201))


def test_what_is_not_a_number_goes_to_the_novel_end(inbox: Inbox) -> None:
    nan = float("nan")
    odd = replace(sighting(make_image(1)), score=-float("inf"), calibrated_score=nan, p_novel=nan, nearest=[("a", nan)])
    found = inbox.get(inbox.add(odd).id or "")
    assert found is not None
    assert (found.score, found.calibrated_score, found.p_novel, found.nearest) == (None, 0.0, 1.0, [("a", 0.0)])


# Folding


def test_the_same_bytes_again_are_counted_and_bring_the_newest_answer(
    inbox: Inbox, clock: Clock, tmp_path: Path
) -> None:
    data = encode(scene(1))
    first = inbox.add(sighting(data))
    clock.now += 5
    again = inbox.add(replace(sighting(data, 1), version=4, score=None, p_novel=0.5, client="app", nearest=[]))
    assert (again.outcome, again.id) == ("folded", first.id)
    found = inbox.get(first.id or "")
    assert found is not None
    assert (found.count, found.first_seen, found.last_seen) == (2, clock.now - 5, clock.now)
    assert (found.prediction_id, found.version, found.score, found.p_novel) == ("prediction-1", 4, None, 0.5)
    assert (found.client, found.nearest) == ("app", [])
    check(inbox, tmp_path, InboxLimits())


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_of_a_picture_are_one_novelty(inbox: Inbox, tmp_path: Path, shape: str) -> None:
    first = inbox.add(sighting(encode(scene(1, shape), quality=85), embedding=[1, 2, 3]))
    for copy in COPIES.values():
        kept = inbox.add(sighting(copy(scene(1, shape)), embedding=[1, 2, 3.1]))
        assert (kept.outcome, kept.id) == ("folded", first.id)
    found = inbox.get(first.id or "")
    assert found is not None
    assert found.count == 1 + len(COPIES)
    assert list(files(tmp_path)) == [first.id]


def test_different_shapes_are_different_novelties(inbox: Inbox) -> None:
    for shape in SHAPES:
        assert inbox.add(sighting(encode(scene(1, shape)))).outcome == "new"
    assert inbox.counts()["new"] == len(SHAPES)


def test_pictures_that_look_alike_stay_apart_when_the_model_sees_them_apart(inbox: Inbox) -> None:
    image = scene(1)
    assert inbox.add(sighting(encode(image, quality=90), embedding=[1, 0, 0])).outcome == "new"
    assert inbox.add(sighting(encode(image, quality=80), embedding=[0, 1, 0])).outcome == "new"
    # Without an embedding, or with one of another length, the eye alone decides.
    assert inbox.add(sighting(encode(image, quality=70))).outcome == "folded"
    assert inbox.add(sighting(encode(image, quality=60), embedding=[0, 0, 0])).outcome == "folded"
    assert inbox.add(sighting(encode(image, quality=50), embedding=[0, 0, 1, 0])).outcome == "folded"


def test_what_is_like_a_dismissed_one_folds_silently_and_what_is_like_a_labelled_one_is_new(inbox: Inbox) -> None:
    unwanted = inbox.add(sighting(encode(scene(1, "circle"), quality=90))).id or ""
    taught = inbox.add(sighting(encode(scene(1, "square"), quality=90))).id or ""
    assert inbox.set_state([unwanted, "f" * 64], "dismissed") == 1
    assert inbox.set_state([taught], "labelled") == 1

    kept = inbox.add(sighting(encode(scene(1, "circle"), quality=70)))
    assert (kept.outcome, kept.id) == ("folded", unwanted)
    assert inbox.list("new").items == ()
    assert inbox.add(sighting(encode(scene(1, "square"), quality=70))).outcome == "new"
    # The very bytes that were labelled would teach nothing more.
    assert inbox.add(sighting(encode(scene(1, "square"), quality=90))).outcome == "folded"
    assert inbox.counts() == {"new": 1, "labelled": 1, "dismissed": 1}


def test_a_state_that_does_not_exist_is_refused(inbox: Inbox) -> None:
    with pytest.raises(ValueError, match="state must be one of"):
        inbox.set_state([], "lost")  # type: ignore[arg-type]


def test_a_wrong_sha256_is_refused_and_spoils_nothing(inbox: Inbox, tmp_path: Path) -> None:
    kept = inbox.add(sighting(make_image(1)))
    inbox.set_state([kept.id or ""], "labelled")  # so that the same bytes under another name do not fold
    for data in (make_image(1), make_image(2)):
        with pytest.raises(ValueError, match="but its bytes have"):
            inbox.add(replace(sighting(data), sha256="0" * 64))
    assert list(files(tmp_path)) == [kept.id]


def test_the_index_finds_the_nearest_of_those_alike_as_entries_come_and_go() -> None:
    generator = np.random.default_rng(0)
    index = LikenessIndex()
    entries: dict[str, tuple[int, NDArray[np.float32] | None, bool]] = {}
    for step in range(3000):
        if entries and generator.random() < 0.3:
            gone = str(generator.choice(list(entries)))
            index.remove(gone)
            del entries[gone]
            continue
        # Few bits and few directions, so that there is always something alike.
        length = int(generator.integers(0, 4))
        vector = unit(generator.choice([-1.0, 1.0], length)) if length else None
        hash, folds = int(generator.integers(0, 2**12)) << 50, bool(generator.random() < 0.8)
        wanted = [
            (hash ^ other).bit_count()
            for other, direction, open_ in entries.values()
            if open_
            and (hash ^ other).bit_count() <= 2
            and (vector is None or direction is None or len(vector) != len(direction) or vector @ direction >= 0.9)
        ]
        found = index.alike(hash, vector, 2, 0.9)
        assert (found is None) == (not wanted)
        if found is not None:
            assert (hash ^ entries[found][0]).bit_count() == min(wanted)
        index.add(str(step), hash, vector, folds)
        entries[str(step)] = (hash, vector, folds)
    assert len(index) == len(entries)


# Bounds


def test_a_full_inbox_gives_up_what_is_done_with_and_then_the_longest_unseen(tmp_path: Path, clock: Clock) -> None:
    limits = InboxLimits(max_count=4)
    with contextlib.closing(Inbox(tmp_path, limits, clock)) as inbox:
        a, b, c, d, e, f, g = (make_image(n) for n in range(7))
        for data in (a, b, c, d):
            clock.now += 1
            inbox.add(sighting(data))
        clock.now += 1
        inbox.add(sighting(a))  # seen again: now b is the longest unseen
        inbox.set_state([sha256_bytes(c)], "labelled")
        inbox.set_state([sha256_bytes(d)], "dismissed")
        left = []
        for data in (e, f, g):
            clock.now += 1
            assert inbox.add(sighting(data)).outcome == "new"
            check(inbox, tmp_path, limits)
            left.append(ids(inbox))
    expected = ([a, b, d, e], [a, b, e, f], [a, e, f, g])
    assert left == [{sha256_bytes(data) for data in some} for some in expected]


def test_bytes_are_bounded_and_what_can_never_fit_is_dropped(tmp_path: Path) -> None:
    pictures = [make_image(n, (40, 40 + n)) for n in range(6)]
    limits = InboxLimits(max_bytes=sum(len(data) for data in pictures[:3]))
    with contextlib.closing(Inbox(tmp_path, limits, Clock())) as inbox:
        for data in pictures:
            assert inbox.add(sighting(data)).outcome == "new"
            check(inbox, tmp_path, limits)
        assert 1 <= inbox.counts()["new"] <= 3
        kept = inbox.add(sighting(make_image(9, (200, 200))))
        assert (kept.outcome, kept.id, kept.reason) == ("dropped", None, "too_large")


def test_more_pixels_than_the_service_takes_are_too_large(tmp_path: Path) -> None:
    with contextlib.closing(Inbox(tmp_path, image_limits=ImageLimits(max_pixels=100))) as inbox:
        assert inbox.add(sighting(make_image(1))).reason == "too_large"


def test_what_has_not_been_seen_for_too_long_is_swept(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock, max_age_seconds=100) as inbox:
        for n in range(3):
            inbox.add(sighting(make_image(n)))
        clock.now += 90
        inbox.add(sighting(make_image(0)))
        assert inbox.sweep() == 0
        clock.now += 20
        assert inbox.sweep() == 2
        assert ids(inbox) == set(files(tmp_path)) == {sha256_bytes(make_image(0))}


def test_age_is_bounded_even_when_nobody_sweeps(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock, max_age_seconds=100) as inbox:
        inbox.add(sighting(make_image(1)))
        clock.now += 101
        inbox.add(sighting(make_image(2)))
        assert ids(inbox) == {sha256_bytes(make_image(2))}


def test_new_ones_are_bounded_in_rate_and_folded_ones_cost_nothing(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock, rate=2, burst=3) as inbox:
        assert [inbox.add(sighting(make_image(n))).reason for n in range(5)] == [None, None, None, "rate", "rate"]
        assert [inbox.add(sighting(make_image(0))).outcome for _ in range(5)] == ["folded"] * 5
        clock.now += 0.5
        assert [inbox.add(sighting(make_image(n))).reason for n in (3, 4)] == [None, "rate"]
        clock.now -= 1000  # a clock that was set back does not stop it for as long
        assert inbox.add(sighting(make_image(4))).reason == "rate"
        clock.now += 0.5
        assert [inbox.add(sighting(make_image(n))).reason for n in (4, 5)] == [None, "rate"]
        clock.now += 3600
        assert [inbox.add(sighting(make_image(n))).reason for n in range(5, 9)] == [None, None, None, "rate"]


PICTURES = [make_image(n, (8 + 4 * n, 8)) for n in range(10)]
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
def test_the_bounds_hold_after_any_sequence(steps: list[tuple[str, int]], count: int, size: int) -> None:
    clock, limits = Clock(), InboxLimits(max_count=count, max_bytes=size, max_age_seconds=100, burst=10)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        inbox = Inbox(root, limits, clock)
        for step, value in steps:
            id = sha256_bytes(PICTURES[value]) if value < len(PICTURES) else ""
            if step == "add":
                inbox.add(sighting(PICTURES[value]))
            elif step == "wait":
                clock.now += value
            elif step == "delete":
                there = id in ids(inbox)
                assert inbox.delete(id) == there
            elif step == "reopen":
                inbox.close()
                inbox = Inbox(root, limits, clock)
            else:
                inbox.set_state([id], "labelled" if step == "labelled" else "dismissed")
            check(inbox, root, limits)
        inbox.close()


@pytest.mark.parametrize(
    "limits",
    [{"max_count": 0}, {"max_bytes": 0}, {"burst": 0}, {"rate": 0}, {"max_age_seconds": -1}, {"fold_bits": 65}],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        InboxLimits(**limits)


# Paging


def test_pages_show_everything_once_last_seen_first_while_others_are_added(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock) as inbox:
        # The clock stands still for some, so that last_seen alone would not order them.
        added = []
        for n in range(10):
            clock.now += n % 2
            added.append(inbox.add(sighting(make_image(n))).id)
        page = inbox.list(limit=4)
        seen = [item.id for item in page.items]
        while page.next_cursor is not None:
            inbox.add(sighting(make_image(100 + len(seen))))
            inbox.add(sighting(make_image(9)))  # one that was shown already moves to the front
            page = inbox.list(limit=4, before=page.next_cursor)
            seen += [item.id for item in page.items]
        assert seen == added[::-1]


def test_a_cursor_stays_good_when_its_novelty_is_gone(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        added = [inbox.add(sighting(make_image(n))).id or "" for n in range(6)]
        page = inbox.list(limit=2)
        for item in page.items:
            inbox.delete(item.id)
        rest = inbox.list(limit=10, before=page.next_cursor)
        assert [item.id for item in rest.items] == added[3::-1]
        assert rest.next_cursor is None
        assert inbox.list(before=10**30).items == inbox.list().items
        assert inbox.list(before=-(10**30)).items == ()
        with pytest.raises(ValueError, match="at least 1"):
            inbox.list(limit=0)


# On the disk


def test_an_inbox_opened_again_is_the_same(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock) as inbox:
        first = inbox.add(sighting(encode(scene(1), quality=90), embedding=[1, 0]))
        other = inbox.add(sighting(encode(scene(1, "cross")), embedding=[0, 1]))
        inbox.set_state([other.id or ""], "dismissed")
        before, used = [inbox.get(first.id or ""), inbox.get(other.id or "")], inbox.bytes_used
    with open_inbox(tmp_path, clock) as inbox:
        assert [inbox.get(first.id or ""), inbox.get(other.id or "")] == before
        assert inbox.bytes_used == used
        # The index is there again: copies fold, also into what was dismissed, and embeddings keep apart.
        assert inbox.add(sighting(encode(scene(1), quality=60), embedding=[1, 0.1])).id == first.id
        assert inbox.add(sighting(encode(scene(1, "cross"), quality=60), embedding=[0.1, 1])).id == other.id
        assert inbox.add(sighting(encode(scene(1), quality=50), embedding=[-1, 0])).outcome == "new"
        assert [item.id for item in inbox.list().items][1] == first.id


def test_tighter_limits_hold_as_soon_as_it_is_opened(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        for n in range(6):
            inbox.add(sighting(make_image(n)))
    with open_inbox(tmp_path, max_count=2) as inbox:
        assert ids(inbox) == set(files(tmp_path)) == {sha256_bytes(make_image(n)) for n in (4, 5)}


def test_bytes_without_a_row_and_rows_without_bytes_go_when_it_is_opened(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        kept, lost = (inbox.add(sighting(make_image(n))).id or "" for n in range(2))
    images = tmp_path / "inbox" / "images"
    (images / lost[:2] / lost).unlink()
    for name in ("0" * 64, f".{'0' * 64}.0123456789abcdef.tmp"):
        (images / "00").mkdir(exist_ok=True)
        (images / "00" / name).write_bytes(b"left behind by a kill")
    with open_inbox(tmp_path) as inbox:
        assert ids(inbox) == set(files(tmp_path)) == {kept}
        assert inbox.bytes_used == len(make_image(0))
        assert inbox.add(sighting(make_image(1))).outcome == "new"


def test_a_row_whose_bytes_are_lost_goes_when_it_is_read(inbox: Inbox, tmp_path: Path) -> None:
    id = inbox.add(sighting(make_image(1))).id or ""
    (tmp_path / "inbox" / "images" / id[:2] / id).unlink()
    with pytest.raises(NotFound, match="lost"):
        inbox.read_image(id)
    assert inbox.get(id) is None
    assert inbox.bytes_used == 0


def test_damaged_bytes_are_never_handed_out(inbox: Inbox, tmp_path: Path) -> None:
    id = inbox.add(sighting(make_image(1))).id or ""
    (tmp_path / "inbox" / "images" / id[:2] / id).write_bytes(b"other bytes")
    with pytest.raises(StoreError, match="corrupt"):
        inbox.read_image(id)
    assert inbox.delete(id)
    assert files(tmp_path) == {}


def test_a_failed_write_leaves_no_bytes_behind(inbox: Inbox, tmp_path: Path) -> None:
    inbox.add(sighting(make_image(1)))
    assert inbox._table is not None
    inbox._table._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="space and rights"):
        inbox.add(sighting(make_image(2)))
    with pytest.raises(StoreError, match="space and rights"):
        inbox.add(sighting(make_image(1)))
    inbox._table._connection.execute("PRAGMA query_only = OFF")
    check(inbox, tmp_path, InboxLimits())
    assert inbox.add(sighting(make_image(2))).outcome == "new"


def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        inbox.add(sighting(make_image(1)))
    path = tmp_path / "inbox" / "inbox.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"schema 99.*move the file away"):
            Inbox(tmp_path)
    assert len(files(tmp_path)) == 1


def test_a_damaged_file_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        inbox.add(sighting(make_image(1)))
    path = tmp_path / "inbox" / "inbox.sqlite3"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError, match="damaged, move it away"):
        Inbox(tmp_path)
    path.rename(tmp_path / "away")
    with open_inbox(tmp_path) as inbox:
        assert inbox.add(sighting(make_image(2))).outcome == "new"
        assert ids(inbox) == set(files(tmp_path)) == {sha256_bytes(make_image(2))}


def test_a_second_owner_is_refused_until_the_first_has_closed(inbox: Inbox, tmp_path: Path) -> None:
    inbox.add(sighting(make_image(1)))
    with pytest.raises(StoreError, match="another process has this inbox open"):
        Inbox(tmp_path)
    inbox.close()
    with open_inbox(tmp_path) as second:
        assert second.counts()["new"] == 1
        assert inbox.list().items == ()
        with pytest.raises(StoreError, match="closed"):
            inbox.add(sighting(make_image(2)))


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "inbox").write_text("a file where the folder should be")
    with open_inbox(tmp_path) as inbox:
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be opened"):
                inbox.add(sighting(make_image(1)))
        assert inbox.counts()["new"] == 0


# Not this module's own `sighting`: with all that the module imports, a process would take a second to start.
PROCESS = """
import os, signal, sys
from pathlib import Path
from service.inbox import Inbox, InboxLimits, Sighting
from service.inbox.table import InboxTable
from tasks.images import ImageStore
from tests.support.images import make_image

def sighting(n):
    answer = dict(version=1, score=None, calibrated_score=0.0, p_novel=1.0, nearest=[], client="robot")
    return Sighting(data=make_image(n, (16, 16)), prediction_id=str(n), **answer)
"""

ADDING = f"""{PROCESS}
inbox = Inbox(Path(sys.argv[1]), InboxLimits(max_count=20, rate=1e6, burst=10**6))
for n in range(int(sys.argv[2]), 10**6):
    kept = inbox.add(sighting(n))
    print(kept.outcome, kept.id, flush=True)
"""


def test_killed_while_adding_it_is_usable_and_has_what_it_said_it_kept(tmp_path: Path) -> None:
    limits = InboxLimits(max_count=20)
    for attempt, lines in enumerate((1, 17, 40)):
        command = [sys.executable, "-c", ADDING, str(tmp_path), str(1000 * attempt)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = [process.stdout.readline().split() for _ in range(lines)]
            process.send_signal(signal.SIGKILL)
            said += [line.split() for line in process.stdout]
        assert all(outcome == "new" for outcome, _ in said)
        with contextlib.closing(Inbox(tmp_path, limits)) as inbox:
            check(inbox, tmp_path, limits)
            # One more may have been added and not said.
            assert {id for _, id in said[-limits.max_count + 1 :]} <= ids(inbox)
            assert inbox.add(sighting(make_image(10**6 + attempt))).outcome == "new"


DYING = f"""{PROCESS}
owner = InboxTable if sys.argv[2] == "table" else ImageStore
name, when, call = sys.argv[3], sys.argv[4], int(sys.argv[5])
original, calls = getattr(owner, name), []

def dying(*args):
    calls.append(args)
    if when == "before" and len(calls) == call:
        os.kill(os.getpid(), signal.SIGKILL)
    result = original(*args)
    if when == "after" and len(calls) == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, dying)
inbox = Inbox(Path(sys.argv[1]), InboxLimits(max_count=3))
for n in range(6):
    inbox.add(sighting(n))
"""


@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("table _set_up before 1", 0),
        ("table _set_up after 1", 0),
        ("images put after 1", 0),
        ("images put after 3", 2),
        ("table insert after 3", 3),
        ("images remove after 1", 2),
        ("table delete after 2", 2),  # the first is that of the lost rows at opening
    ],
)
def test_killed_between_any_two_steps_it_is_usable(tmp_path: Path, step: str, left: int) -> None:
    command = [sys.executable, "-c", DYING, str(tmp_path), *step.split()]
    process = subprocess.run(command, cwd=ROOT, check=False, timeout=60)
    assert process.returncode == -signal.SIGKILL
    limits = InboxLimits(max_count=3)
    with contextlib.closing(Inbox(tmp_path, limits)) as inbox:
        if inbox.add(sighting(make_image(0, (16, 16)))).outcome == "new":
            left = min(left + 1, limits.max_count)
        assert len(ids(inbox)) == left
        check(inbox, tmp_path, limits)


def test_threads_that_add_and_read_at_once_lose_nothing(tmp_path: Path) -> None:
    sightings, threads = 30, 4
    errors: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with open_inbox(tmp_path) as inbox:

        def add() -> None:
            for n in range(sightings):
                inbox.add(sighting(make_image(n)))

        def read() -> None:
            while not done.is_set():
                for item in inbox.list(limit=5).items:
                    assert inbox.read_image(item.id)
                assert sum(inbox.counts().values()) <= sightings
                inbox.sweep()

        readers, adders = [guarded(read) for _ in range(2)], [guarded(add) for _ in range(threads)]
        for thread in adders:
            thread.join()
        done.set()
        for thread in readers:
            thread.join()
        assert errors == []
        items = inbox.list(limit=100).items
        assert len(items) == sightings
        assert [item.count for item in items] == [threads] * sightings
        check(inbox, tmp_path, InboxLimits())
