"""The shared inbox: one owner, every record counted once, the same bounds, and the same content for the next owner."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace

import pytest

from models.errors import StoreError
from service.errors import InboxMoved
from service.shared import Lease, SharedInbox, inbox_sink
from service.shared import inbox as shared_inbox
from tasks.errors import QueueUnavailable
from tests.support.inbox import sighting
from tests.support.novelties import block_image
from tests.support.redis_servers import PREFIX, RedisServer
from tests.support.shared_inboxes import FAR_APART, SHORT_SECONDS, NewServer, send
from tests.support.waiting import wait_until


def test_the_owner_gets_the_novelties_of_all_servers(new_server: NewServer) -> None:
    first = new_server()
    wait_until(lambda: first.inbox)
    second = new_server()
    a, b = send(first, 1, 0), send(second, 2, 1)
    wait_until(lambda: len(first.counts()) == 2)
    assert second.inbox is None
    wait_until(lambda: second.owner.owner == first.name)
    again = send(second, 1, 0)  # the same bytes
    wait_until(lambda: first.counts() == {a: 2, b: 1})
    assert again == a
    assert first.inbox is not None
    assert first.inbox.read_image(b) == block_image(2)
    wait_until(lambda: [result.outcome for result in first.results] == ["new", "new", "folded"])


def test_the_next_owner_has_the_same_novelties_with_their_states(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_server()
    wait_until(lambda: first.inbox)
    ids = [send(first, number, number) for number in range(4)]
    wait_until(lambda: len(first.counts()) == 4)
    assert first.inbox is not None
    first.inbox.set_state([ids[0]], "dismissed")
    first.inbox.delete([ids[1]])
    first.sink.mark_labelled([ids[2], "unknown"])
    wait_until(lambda: first.inbox and first.inbox.counts()["labelled"] == 1)
    before = {id: first.inbox.get(id) for id in ids}
    monkeypatch.setattr(shared_inbox, "LEASE_SECONDS", SHORT_SECONDS)
    wait_until(lambda: first.lease_seconds <= SHORT_SECONDS)  # it was renewed
    first.crash()
    late = send(first, 9)  # no server owns the inbox now: the record waits

    second = new_server()
    wait_until(lambda: second.inbox)
    wait_until(lambda: late in second.counts())
    assert second.inbox is not None
    assert {id: second.inbox.get(id) for id in ids} == before
    assert second.inbox.counts() == {"new": 2, "labelled": 1, "dismissed": 1}
    assert set(second.counts().values()) == {1}


def test_a_record_counts_once_if_the_owner_ends_before_its_commit(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_server()
    wait_until(lambda: first.inbox)
    a = send(first, 1, 0)
    wait_until(lambda: first.counts() == {a: 1})
    with monkeypatch.context() as patch:
        patch.setattr(SharedInbox, "_commit", lambda self, entry: first.owner._stopping.set())
        send(first, 1, 0)
        first.owner._thread.join()
    assert first.counts() == {a: 2}, "counted by the owner, and not committed"
    first.expire_lease()
    second = new_server()
    wait_until(lambda: second.inbox)
    wait_until(lambda: second.state.length("inbox-stream") == 0)
    assert second.counts() == {a: 2}


def test_a_record_that_is_sent_twice_is_one_record(new_server: NewServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = new_server(start=False)
    run = server.state.run
    monkeypatch.setattr(server.state, "run", lambda *arguments: (run(*arguments), run(*arguments))[1])
    send(server, 1)
    assert server.state.length("inbox-stream") == 1


def test_a_server_that_lost_the_inbox_changes_nothing(new_server: NewServer) -> None:
    first, second = new_server(start=False), new_server(start=False)
    old, new = Lease("old", first.name), Lease("new", second.name)
    assert first.state.run("inbox_lease", *old.arguments) == b"old http://server-1"
    with closing(first.open(old)) as zombie:
        a = zombie.add(sighting(block_image(1))).id
        assert a is not None
        assert second.state.run("inbox_lease", *new.arguments) == b"old http://server-1"
        first.expire_lease()
        assert second.state.run("inbox_lease", *new.arguments) == b"new http://server-2"
        with closing(second.open(new)) as inbox:
            for change in (
                lambda: zombie.add(sighting(block_image(2))),
                lambda: zombie.set_state([a], "dismissed"),
                lambda: zombie.delete([a]),
            ):
                with pytest.raises(InboxMoved):
                    change()
            assert zombie.lost
            assert inbox.counts() == {"new": 1, "labelled": 0, "dismissed": 0}
            inbox.set_state([a], "labelled")
    assert second.state.run("inbox_lease", *new.arguments) == b"new http://server-2"


def test_count_and_bytes_and_rate_are_bounded(new_server: NewServer) -> None:
    server = new_server(max_count=3, burst=5, rate=0.001)
    wait_until(lambda: server.inbox)
    data = [block_image(number) for number in range(8)]
    outcomes = [server.sink.add(sighting(one, n, FAR_APART[n % 4])) for n, one in enumerate(data)]
    assert [one.reason for one in outcomes] == [None] * 5 + ["rate"] * 3
    wait_until(lambda: server.state.length("inbox-stream") == 0)
    assert len(server.counts()) == 3
    assert {image.sha256 for image in server.images} == set(server.counts()), "images without a novelty are removed"


def test_an_unread_stream_is_bounded(new_server: NewServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_sink, "MAX_WAITING", 2)
    server = new_server(start=False)
    reasons = [server.sink.add(sighting(block_image(number))).reason for number in range(4)]
    assert reasons == [None, None, "queue", "queue"]
    assert len(list(server.images)) == 2


def test_erased_images_do_not_come_back_from_the_stream(new_server: NewServer) -> None:
    server = new_server(start=False)
    id = send(server, 1)
    server.erased.add(id)
    server.owner.start()
    wait_until(lambda: server.results)
    assert server.results[0].reason == "erased"
    assert server.counts() == {}
    assert list(server.images) == []
    server.owner.stop()


def test_a_record_without_its_image_and_one_that_is_no_record_are_skipped(
    new_server: NewServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = new_server(start=False)
    server.images.remove(send(server, 1))
    server.state.client.xadd(f"{PREFIX}:inbox-stream", {"kind": "sighting", "data": "?"})
    last = send(server, 2)
    server.owner.start()
    wait_until(lambda: server.inbox and server.counts() == {last: 1})
    assert "cannot be read" in caplog.text
    assert server.results[0].reason == "error"
    server.owner.stop()


def test_images_that_redis_has_forgotten_become_novelties_again(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_inbox, "ADOPT_SECONDS", 0.0)
    server = new_server(start=False)
    id = server.images.put(block_image(1))
    server.owner.start()
    wait_until(lambda: server.inbox and server.counts() == {id: 1})
    server.owner.stop()
    # Redis knows the inbox now: an image without a row is the rest of a sighting that was folded or dropped.
    monkeypatch.setattr(shared_inbox, "ORPHAN_SECONDS", 0.0)
    server.images.put(block_image(2))
    later = new_server()
    wait_until(lambda: [image.sha256 for image in server.images] == [id])
    wait_until(lambda: later.inbox and later.counts() == {id: 1})


def test_the_owner_reads_the_inbox_again_after_redis_was_away(redis_server: RedisServer, new_server: NewServer) -> None:
    server = new_server()
    wait_until(lambda: server.inbox)
    a = send(server, 1, 0)
    wait_until(lambda: server.counts() == {a: 1})
    before = server.inbox
    assert before is not None
    redis_server.stop()
    with pytest.raises(QueueUnavailable):
        before.set_state([a], "dismissed")
    assert before.get(a) is not None, "it can still be read"
    redis_server.start()
    wait_until(lambda: server.inbox is not before)
    assert server.inbox is not None
    assert server.inbox.counts()["new"] == 1, "a change that was answered with an error was not made"


def test_a_lost_inbox_refuses_changes_until_it_was_read_again(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server(start=False)
    lease = Lease("a", server.name)
    server.state.run("inbox_lease", *lease.arguments)
    with closing(server.open(lease)) as inbox:
        a = inbox.add(sighting(block_image(1))).id
        assert a is not None
        with monkeypatch.context() as patch:
            patch.setattr(server.state, "run", unavailable)
            with pytest.raises(QueueUnavailable):
                inbox.set_state([a], "dismissed")
        with closing(server.open(lease)) as reopened:
            reopened.set_state([a], "labelled")
            with pytest.raises(InboxMoved, match="read again"):
                inbox.add(sighting(block_image(1)))  # would fold, and write the row with its old state
        with closing(server.open(lease)) as last:
            assert last.counts() == {"new": 0, "labelled": 1, "dismissed": 0}


def test_a_change_that_is_under_way_is_in_the_rows_that_are_read_again(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server(start=False)
    server.owner._step()
    first = server.inbox
    assert first is not None
    a = first.add(sighting(block_image(1))).id
    assert a is not None
    committing, go_on = threading.Event(), threading.Event()
    commit = first._commit

    def slow_commit(entry: str) -> None:
        committing.set()
        go_on.wait(10)
        commit(entry)

    monkeypatch.setattr(first, "_commit", slow_commit)
    change = threading.Thread(target=first.set_state, args=[[a], "labelled"])
    change.start()
    assert committing.wait(10)
    opening = threading.Thread(target=server.owner._open)
    opening.start()
    opening.join(0.3)
    go_on.set()
    change.join()
    opening.join()
    assert server.inbox is not first
    assert server.inbox is not None
    assert server.inbox.counts()["labelled"] == 1
    server.owner.stop()


def unavailable(*arguments: object) -> None:
    raise QueueUnavailable("no answer")


def test_a_sighting_with_a_wrong_hash_is_refused(new_server: NewServer) -> None:
    server = new_server(start=False)
    server.state.run("inbox_lease", *Lease("a", server.name).arguments)
    with closing(server.open(Lease("a", server.name))) as inbox:
        wrong = replace(sighting(block_image(1)), sha256="0" * 64)
        with pytest.raises((ValueError, StoreError)):
            inbox.add(wrong)
        assert inbox.counts()["new"] == 0
