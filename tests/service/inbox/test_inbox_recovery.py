"""The inbox on the disk: reopened, damaged, or killed at any moment."""

import contextlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from models.errors import StoreError
from models.files import sha256_bytes
from service.errors import NotFound
from service.inbox import Inbox, InboxLimits
from tests.support.images import make_image
from tests.support.inbox import Clock, check_consistent, encode, image_files, novelty_ids, open_inbox, scene, sighting
from tests.support.paths import ROOT


def test_a_reopened_inbox_is_unchanged(tmp_path: Path, clock: Clock) -> None:
    with open_inbox(tmp_path, clock) as inbox:
        first = inbox.add(sighting(encode(scene(1), quality=90), embedding=[1, 0]))
        other = inbox.add(sighting(encode(scene(1, "cross")), embedding=[0, 1]))
        inbox.set_state([other.id or ""], "dismissed")
        before, used = [inbox.get(first.id or ""), inbox.get(other.id or "")], inbox.bytes_used
    with open_inbox(tmp_path, clock) as inbox:
        assert [inbox.get(first.id or ""), inbox.get(other.id or "")] == before
        assert inbox.bytes_used == used
        # The index is complete: copies fold, also into the dismissed novelty, and embeddings are compared.
        assert inbox.add(sighting(encode(scene(1), quality=60), embedding=[1, 0.1])).id == first.id
        assert inbox.add(sighting(encode(scene(1, "cross"), quality=60), embedding=[0.1, 1])).id == other.id
        assert inbox.add(sighting(encode(scene(1), quality=50), embedding=[-1, 0])).outcome == "new"
        assert [item.id for item in inbox.list().items][1] == first.id


def test_lower_limits_hold_when_the_inbox_is_opened(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        for n in range(6):
            inbox.add(sighting(make_image(n)))
    with open_inbox(tmp_path, max_count=2) as inbox:
        assert novelty_ids(inbox) == set(image_files(tmp_path)) == {sha256_bytes(make_image(n)) for n in (4, 5)}


def test_opening_removes_incomplete_files_and_rows_without_an_image(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        added, lost = (inbox.add(sighting(make_image(n))).id or "" for n in range(2))
    images = tmp_path / "inbox" / "images"
    (images / lost[:2] / lost).unlink()
    for name in ("0" * 64, f".{'0' * 64}.0123456789abcdef.tmp"):
        (images / "00").mkdir(exist_ok=True)
        (images / "00" / name).write_bytes(b"left by a kill")
    with open_inbox(tmp_path) as inbox:
        assert novelty_ids(inbox) == set(image_files(tmp_path)) == {added}
        assert inbox.bytes_used == len(make_image(0))
        assert inbox.add(sighting(make_image(1))).outcome == "new"


def test_reading_a_lost_image_removes_its_row(inbox: Inbox, tmp_path: Path) -> None:
    id = inbox.add(sighting(make_image(1))).id or ""
    (tmp_path / "inbox" / "images" / id[:2] / id).unlink()
    with pytest.raises(NotFound, match="lost"):
        inbox.read_image(id)
    assert inbox.get(id) is None
    assert inbox.bytes_used == 0


def test_a_damaged_image_is_not_returned(inbox: Inbox, tmp_path: Path) -> None:
    id = inbox.add(sighting(make_image(1))).id or ""
    (tmp_path / "inbox" / "images" / id[:2] / id).write_bytes(b"other bytes")
    with pytest.raises(StoreError, match="corrupt"):
        inbox.read_image(id)
    assert inbox.delete([id]) == 1
    assert image_files(tmp_path) == {}


def test_a_failed_write_leaves_no_image(inbox: Inbox, tmp_path: Path) -> None:
    inbox.add(sighting(make_image(1)))
    assert inbox._table is not None
    inbox._table._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="space and rights"):
        inbox.add(sighting(make_image(2)))
    with pytest.raises(StoreError, match="space and rights"):
        inbox.add(sighting(make_image(1)))
    inbox._table._connection.execute("PRAGMA query_only = OFF")
    check_consistent(inbox, tmp_path, InboxLimits())
    assert inbox.add(sighting(make_image(2))).outcome == "new"


def test_an_unknown_schema_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        inbox.add(sighting(make_image(1)))
    path = tmp_path / "inbox" / "inbox.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"schema 99.*move the file away"):
            Inbox(tmp_path)
    assert len(image_files(tmp_path)) == 1


def test_a_damaged_database_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        inbox.add(sighting(make_image(1)))
    path = tmp_path / "inbox" / "inbox.sqlite3"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError, match="damaged, move it away"):
        Inbox(tmp_path)
    path.rename(tmp_path / "away")
    with open_inbox(tmp_path) as inbox:
        assert inbox.add(sighting(make_image(2))).outcome == "new"
        kept = {sha256_bytes(make_image(n)) for n in (1, 2)}
        assert novelty_ids(inbox) == set(image_files(tmp_path)) == kept


def test_moving_the_database_away_keeps_every_image_and_moving_it_back_restores_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "inbox" / "inbox.sqlite3"
    with open_inbox(tmp_path) as inbox:
        ids = [inbox.add(sighting(make_image(n))).id or "" for n in range(3)]
    path.rename(tmp_path / "away")
    with open_inbox(tmp_path) as inbox:
        assert novelty_ids(inbox) == set(image_files(tmp_path)) == set(ids)
        assert [inbox.read_image(id) for id in ids] == [make_image(n) for n in range(3)]
        assert (inbox.get(ids[0]) or pytest.fail("lost")).score is None
    (tmp_path / "away").rename(path)
    with open_inbox(tmp_path) as inbox:
        assert (inbox.get(ids[0]) or pytest.fail("lost")).score == -1.5


def test_a_second_process_is_refused_until_the_first_closes_the_inbox(inbox: Inbox, tmp_path: Path) -> None:
    inbox.add(sighting(make_image(1)))
    with pytest.raises(StoreError, match="another process has this inbox open"):
        Inbox(tmp_path)
    inbox.close()
    with open_inbox(tmp_path) as second:
        assert second.counts()["new"] == 1
        assert inbox.list().items == ()
        with pytest.raises(StoreError, match="closed"):
            inbox.add(sighting(make_image(2)))


def test_a_folder_that_cannot_be_created_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "inbox").write_text("a file where the folder should be")
    with open_inbox(tmp_path) as inbox:
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be opened"):
                inbox.add(sighting(make_image(1)))
        assert inbox.counts()["new"] == 0


# Not the `sighting` of tests.support: with its imports, a process would take a second to start.
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
    added = inbox.add(sighting(n))
    print(added.outcome, added.id, flush=True)
"""


def test_after_a_kill_while_adding_the_inbox_has_every_reported_novelty(tmp_path: Path) -> None:
    limits = InboxLimits(max_count=20)
    for attempt, lines in enumerate((1, 17, 40)):
        command = [sys.executable, "-c", ADDING, str(tmp_path), str(1000 * attempt)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reported = [process.stdout.readline().split() for _ in range(lines)]
            process.send_signal(signal.SIGKILL)
            reported += [line.split() for line in process.stdout]
        assert all(outcome == "new" for outcome, _ in reported)
        with contextlib.closing(Inbox(tmp_path, limits)) as inbox:
            check_consistent(inbox, tmp_path, limits)
            # One more may have been added and not reported.
            assert {id for _, id in reported[-limits.max_count + 1 :]} <= novelty_ids(inbox)
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
        ("images put after 1", 1),
        ("images put after 3", 3),
        ("table insert after 3", 3),
        ("images remove after 1", 2),
        ("table delete after 2", 2),  # the first call deletes lost rows when the inbox is opened
    ],
)
def test_after_a_kill_between_any_two_steps_the_inbox_is_usable(tmp_path: Path, step: str, left: int) -> None:
    command = [sys.executable, "-c", DYING, str(tmp_path), *step.split()]
    process = subprocess.run(command, cwd=ROOT, check=False, timeout=60)
    assert process.returncode == -signal.SIGKILL
    limits = InboxLimits(max_count=3)
    with contextlib.closing(Inbox(tmp_path, limits)) as inbox:
        if inbox.add(sighting(make_image(0, (16, 16)))).outcome == "new":
            left = min(left + 1, limits.max_count)
        assert len(novelty_ids(inbox)) == left
        check_consistent(inbox, tmp_path, limits)
