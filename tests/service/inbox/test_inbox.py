"""Novelties are added, folded, listed and read back."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.files import sha256_bytes
from service.errors import NotFound
from service.inbox import Inbox, InboxLimits, StateChange
from tests.support.images import make_image
from tests.support.inbox import (
    COPIES,
    SHAPES,
    Clock,
    check_consistent,
    encode,
    image_files,
    open_inbox,
    scene,
    sighting,
)


def test_a_novelty_is_read_back_with_all_its_fields(inbox: Inbox, clock: Clock) -> None:
    data = encode(scene(1))
    added = inbox.add(sighting(data, embedding=[3, 4]))
    assert (added.outcome, added.id, added.reason) == ("new", sha256_bytes(data), None)
    assert added.id is not None
    found = inbox.get(added.id)
    assert found is not None
    assert (found.first_seen, found.last_seen, found.count, found.state) == (clock.now, clock.now, 1, "new")
    assert (found.version, found.score, found.calibrated_score, found.p_novel) == (3, -1.5, 0.01, 0.75)
    assert found.nearest == [("apple", 0.5), ("pear", 0.25)]
    assert (found.prediction_id, found.client) == ("prediction-0", "robot")
    assert (found.bytes, found.width, found.height) == (len(data), 240, 180)
    embedding = inbox._index.embedding(added.id)
    assert embedding is not None
    np.testing.assert_allclose(embedding, [0.6, 0.8], atol=1e-3)
    assert inbox.read_image(added.id) == data


def test_nothing_is_written_before_the_first_novelty(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        assert inbox.list().items == ()
        assert inbox.counts() == {"new": 0, "labelled": 0, "dismissed": 0}
        assert inbox.get("a" * 64) is None
        assert inbox.set_state(["a" * 64], "dismissed") == StateChange((), ("a" * 64,))
        assert inbox.delete(["../outside"]) == 0
        assert inbox.sweep() == inbox.bytes_used == 0
        with pytest.raises(NotFound):
            inbox.read_image("a" * 64)
        assert inbox.add(sighting(b"not an image")).reason == "unreadable"
    assert [path.name for path in tmp_path.iterdir()] == [".inbox.lock"]  # by which one process owns the inbox


@pytest.mark.parametrize("orientation", [1, 6])
def test_the_size_is_that_of_the_upright_original(inbox: Inbox, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    added = inbox.add(sighting(encode(scene(1, size=(1201, 800)), exif=exif)))
    found = inbox.get(added.id or "")
    assert found is not None
    assert (found.width, found.height) == ((1201, 800) if orientation == 1 else (800, 1201))


def test_a_value_that_is_not_finite_becomes_that_of_a_novel_image(inbox: Inbox) -> None:
    nan = float("nan")
    odd = replace(sighting(make_image(1)), score=-float("inf"), calibrated_score=nan, p_novel=nan, nearest=[("a", nan)])
    found = inbox.get(inbox.add(odd).id or "")
    assert found is not None
    assert (found.score, found.calibrated_score, found.p_novel, found.nearest) == (None, 0.0, 1.0, [("a", 0.0)])


# Folding


def test_the_same_bytes_are_counted_and_replace_the_answer(inbox: Inbox, clock: Clock, tmp_path: Path) -> None:
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
    check_consistent(inbox, tmp_path, InboxLimits())


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_of_an_image_are_one_novelty(inbox: Inbox, tmp_path: Path, shape: str) -> None:
    first = inbox.add(sighting(encode(scene(1, shape), quality=85), embedding=[1, 2, 3]))
    for copy in COPIES.values():
        added = inbox.add(sighting(copy(scene(1, shape)), embedding=[1, 2, 3.1]))
        assert (added.outcome, added.id) == ("folded", first.id)
    found = inbox.get(first.id or "")
    assert found is not None
    assert found.count == 1 + len(COPIES)
    assert list(image_files(tmp_path)) == [first.id]


def test_different_shapes_are_different_novelties(inbox: Inbox) -> None:
    for shape in SHAPES:
        assert inbox.add(sighting(encode(scene(1, shape)))).outcome == "new"
    assert inbox.counts()["new"] == len(SHAPES)


def test_images_with_similar_hashes_but_different_embeddings_are_two_novelties(inbox: Inbox) -> None:
    image = scene(1)
    assert inbox.add(sighting(encode(image, quality=90), embedding=[1, 0, 0])).outcome == "new"
    assert inbox.add(sighting(encode(image, quality=80), embedding=[0, 1, 0])).outcome == "new"
    # Without an embedding, or with one of another length, only the hashes are compared.
    assert inbox.add(sighting(encode(image, quality=70))).outcome == "folded"
    assert inbox.add(sighting(encode(image, quality=60), embedding=[0, 0, 0])).outcome == "folded"
    assert inbox.add(sighting(encode(image, quality=50), embedding=[0, 0, 1, 0])).outcome == "folded"


def test_an_image_folds_into_a_similar_dismissed_novelty_but_not_into_a_labelled_one(inbox: Inbox) -> None:
    dismissed = inbox.add(sighting(encode(scene(1, "circle"), quality=90))).id or ""
    labelled = inbox.add(sighting(encode(scene(1, "square"), quality=90))).id or ""
    assert inbox.set_state([dismissed, "f" * 64], "dismissed") == StateChange((dismissed,), ("f" * 64,))
    assert inbox.set_state([labelled], "labelled") == StateChange((labelled,), ())

    added = inbox.add(sighting(encode(scene(1, "circle"), quality=70)))
    assert (added.outcome, added.id) == ("folded", dismissed)
    assert inbox.list("new").items == ()
    assert inbox.add(sighting(encode(scene(1, "square"), quality=70))).outcome == "new"
    # The labelled bytes themselves are no news.
    assert inbox.add(sighting(encode(scene(1, "square"), quality=90))).outcome == "folded"
    assert inbox.counts() == {"new": 1, "labelled": 1, "dismissed": 1}


def test_an_unknown_state_is_refused(inbox: Inbox) -> None:
    with pytest.raises(ValueError, match="state must be one of"):
        inbox.set_state([], "lost")  # type: ignore[arg-type]


def test_a_wrong_sha256_is_refused_and_changes_nothing(inbox: Inbox, tmp_path: Path) -> None:
    added = inbox.add(sighting(make_image(1)))
    inbox.set_state([added.id or ""], "labelled")  # so that the same bytes under another id do not fold
    for data in (make_image(1), make_image(2)):
        with pytest.raises(ValueError, match="but its bytes have"):
            inbox.add(replace(sighting(data), sha256="0" * 64))
    assert list(image_files(tmp_path)) == [added.id]


# Pages


def test_pages_list_every_novelty_once_while_others_are_added(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock) as inbox:
        # Some have the same time, so that last_seen does not order them.
        added = []
        for n in range(10):
            clock.now += n % 2
            added.append(inbox.add(sighting(make_image(n))).id)
        page = inbox.list(limit=4)
        seen = [item.id for item in page.items]
        while page.next_cursor is not None:
            inbox.add(sighting(make_image(100 + len(seen))))
            inbox.add(sighting(make_image(9)))  # already listed: moves to the front
            page = inbox.list(limit=4, before=page.next_cursor)
            seen += [item.id for item in page.items]
        assert seen == added[::-1]


def test_a_cursor_stays_valid_when_its_novelty_is_deleted(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        added = [inbox.add(sighting(make_image(n))).id or "" for n in range(6)]
        page = inbox.list(limit=2)
        for item in page.items:
            inbox.delete([item.id])
        rest = inbox.list(limit=10, before=page.next_cursor)
        assert [item.id for item in rest.items] == added[3::-1]
        assert rest.next_cursor is None
        assert inbox.list(before=10**30).items == inbox.list().items
        assert inbox.list(before=-(10**30)).items == ()
        with pytest.raises(ValueError, match="at least 1"):
            inbox.list(limit=0)


# Threads


def test_concurrent_threads_lose_no_sighting(tmp_path: Path) -> None:
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
        check_consistent(inbox, tmp_path, InboxLimits())
