"""Likeness groups: every novelty is in exactly one, and stays there while somebody labels them."""

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service.inbox import Inbox, Only
from service.inbox.group_pages import cut
from service.inbox.groups import CLOSE, CLOSE_BITS, LikenessGroups
from service.inbox.likeness import unit
from service.inbox.rows import Listed
from tests.service.inbox.test_inbox import Clock, open_inbox, sighting
from tests.support.images import make_image

Vector = NDArray[np.float32]


def direction(seed: int, length: int = 8) -> Vector:
    vector = unit(np.random.default_rng(seed).normal(size=length))
    assert vector is not None
    return vector


def clusters(classes: int, each: int, dimensions: int, spread: float, seed: int = 0) -> list[tuple[int, Vector]]:
    """Shuffled (class, embedding), sparse and positive as pooled features are.

    With a spread of 0.3 the cosines are 0.71 within a class and 0.19 between two; of Grocery photos, 0.64 and 0.22.
    """
    rng = np.random.default_rng(seed)
    centres = rng.gamma(0.15, 1.0, (classes, dimensions))
    out = []
    for number in rng.permutation(classes * each):
        c = int(number) % classes
        own = rng.gamma(1 / spread, spread, dimensions)
        vector = unit(centres[c] * own + rng.gamma(0.15, 0.5, dimensions))
        assert vector is not None
        out.append((c, vector))
    return out


# The partition


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "remove"]),
        st.integers(0, 11),
        st.sampled_from([None, 4, 8]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_every_entry_is_in_exactly_one_group_and_stays_there(steps: list[tuple[str, int, int | None, int]]) -> None:
    groups, there, first = LikenessGroups(), {}, {}
    for step, number, length, seed in steps:
        id = f"entry {number}"
        if step == "add" and id not in there:
            embedding = None if length is None else direction(seed, length)
            there[id] = embedding
            first[id] = groups.add(id, seed * 0x1111_1111_1111, embedding)
        elif step == "remove" and id in there:
            groups.remove(id, there.pop(id))
            del first[id]
        assert {id: groups.of(id) for id in there} == first
        members = [member for group in set(first.values()) for member in groups.members(group)]
        assert sorted(members) == sorted(there)
        assert len(groups) == len(set(first.values()))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 0.6)), min_size=1, max_size=60))
def test_a_groups_direction_is_the_mean_of_its_members(picks: list[tuple[int, float]]) -> None:
    groups, vectors = LikenessGroups(), {}
    for number, (seed, noise) in enumerate(picks):
        vector = unit(direction(seed) + noise * direction(100 + number))
        assert vector is not None
        vectors[f"{number}"] = vector
        groups.add(f"{number}", 0, vector)
    for id in list(vectors)[::3]:
        groups.remove(id, vectors.pop(id))
    for name, row in groups._row.items():
        expected = sum(vectors[id] for id in groups.members(name))
        np.testing.assert_allclose(groups._sums[row], expected, atol=1e-5)
        np.testing.assert_allclose(groups._norms[row], np.linalg.norm(expected), rtol=1e-4)


def test_an_entry_joins_the_nearest_group_that_is_near_enough() -> None:
    axes = np.eye(4, dtype=np.float32)
    for cosine, expected in ((0.99, "axis 2"), (CLOSE + 0.01, "axis 2"), (CLOSE - 0.01, "entry")):
        groups = LikenessGroups()
        assert [groups.add(f"axis {i}", 0, axes[i]) for i in range(3)] == ["axis 0", "axis 1", "axis 2"]
        between = unit(0.1 * axes[0] + axes[3])
        assert between is not None
        entry = unit(cosine * axes[2] + np.sqrt(1 - cosine**2) * between)
        assert groups.add("entry", 0, entry) == expected
        assert "entry" in groups.members(expected)
    assert groups.members("nobody") == ()


def test_without_an_embedding_the_first_members_hash_decides() -> None:
    groups = LikenessGroups()
    assert groups.add("a", 0, None) == "a"
    assert groups.add("b", (1 << CLOSE_BITS) - 1, None) == "a"
    # As far from `a` as one more bit: that it is near to `b` does not count, or groups would creep.
    assert groups.add("c", (1 << (CLOSE_BITS + 1)) - 1, None) == "c"
    assert groups.add("seen", 0xFFFF_0000_0000, direction(1)) == "seen"
    assert groups.add("d", 0xFFFF_0000_0001, None) == "seen"
    # With an embedding, hashes are not asked.
    assert groups.add("e", 0, -direction(1)) == "e"


def test_embeddings_of_another_length_are_never_compared() -> None:
    groups = LikenessGroups()
    groups.add("short", 0, direction(1, 4))
    padded = np.concatenate([direction(1, 4), np.zeros(4, np.float32)])
    assert groups.add("long", 0, padded) == "long"
    assert groups.add("short again", 0, direction(1, 4)) == "short"


def test_a_group_keeps_its_name_when_its_founder_goes_and_the_founder_finds_it_again() -> None:
    groups = LikenessGroups()
    north, south = direction(1), -direction(1)
    groups.add("founder", 0, north)
    groups.add("second", 0, north)
    groups.remove("founder", north)
    assert groups.add("third", 0, north) == "founder"
    assert groups.add("founder", 0, south) == "founder"
    assert groups.members("founder") == ("second", "third", "founder")


def test_groups_of_pooled_features_are_nearly_pure() -> None:
    pictures = clusters(classes=30, each=40, dimensions=256, spread=0.3)
    groups = LikenessGroups()
    label = {}
    for number, (c, vector) in enumerate(pictures):
        label[f"{number}"] = c
        groups.add(f"{number}", 0, vector)
    most = [Counter(label[id] for id in groups.members(name)).most_common(1)[0][1] for name in groups._names]
    assert sum(most) / len(pictures) > 0.97
    assert 30 <= len(groups) <= 150


# In the inbox


def add(inbox: Inbox, number: int, embedding: Vector | None = None) -> str:
    kept = inbox.add(sighting(make_image(number), number, None if embedding is None else list(embedding)))
    assert kept.outcome == "new"
    assert kept.id is not None
    return kept.id


def test_an_inbox_opened_again_has_the_same_groups(tmp_path: Path) -> None:
    def seen(inbox: Inbox) -> list[tuple[str, tuple[str, ...]]]:
        return [(group.id, group.ids) for group in inbox.groups(limit=200).items]

    with open_inbox(tmp_path, rate=1e6, burst=10**6) as inbox:
        for number, (_, vector) in enumerate(clusters(6, 8, 32, 0.3)):
            add(inbox, number, vector if number % 5 else None)
        before = seen(inbox)
    with open_inbox(tmp_path) as inbox:
        assert seen(inbox) == before
        inbox.delete(before[0][0])
        left = dict(seen(inbox))[before[0][0]]
        assert left == before[0][1][:-1]
    with open_inbox(tmp_path) as inbox:
        # Named after the eldest that is left, and with the same members.
        renamed = next((id, ids) for id, ids in seen(inbox) if set(ids) == set(left))
        assert renamed[0] == left[-1]


def test_groups_show_the_newest_of_a_state(tmp_path: Path) -> None:
    clock = Clock()
    with open_inbox(tmp_path, clock, rate=1e6, burst=10**6) as inbox:
        large, small = [], []
        for number in range(12):
            clock.now += 1
            large.append(add(inbox, number, direction(1)))
        for number in range(20, 23):
            clock.now += 1
            small.append(add(inbox, number, -direction(1)))
        first, second = inbox.groups().items
        assert (first.id, first.size, first.newest_seen) == (large[0], 12, 1_000_012.0)
        assert first.ids == tuple(large[::-1])
        assert tuple(sample.id for sample in first.samples) == first.ids[:8]
        assert {sample.group for sample in first.samples} == {first.id}
        assert (second.id, second.ids) == (small[0], tuple(small[::-1]))
        assert [group.id for group in inbox.groups(order="newest").items] == [small[0], large[0]]
        inbox.set_state(large[1:], "dismissed")
        assert [(group.id, group.size) for group in inbox.groups().items] == [(small[0], 3), (large[0], 1)]
        assert [(group.id, group.size) for group in inbox.groups("dismissed").items] == [(large[0], 11)]
        assert inbox.groups("labelled").items == ()
        page = inbox.list(only=Only(group=small[0]))
        assert [item.id for item in page.items] == small[::-1]
        assert inbox.list(only=Only(group="nobody")).items == ()


def test_an_empty_inbox_has_no_groups(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        assert inbox.groups().items == ()
        with pytest.raises(ValueError, match="at least 1"):
            inbox.groups(limit=0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=12), st.sampled_from(["largest", "newest"]), st.integers(1, 5))
def test_pages_show_every_group_once_in_order(sizes: list[int], order: str, limit: int) -> None:
    rng = np.random.default_rng(sum(sizes))
    numbers = iter(rng.permutation(sum(sizes)).tolist())
    groups = {}
    for name, size in enumerate(sizes):
        seen = sorted((next(numbers) for _ in range(size)), reverse=True)
        groups[f"{name}"] = [Listed(f"{one}", one, float(one)) for one in seen]
    shown, before = [], None
    while True:
        page, before = cut(groups, order, limit, before)  # type: ignore[arg-type]
        assert len(page) <= limit
        shown += page
        if before is None:
            break
    assert sorted(group.id for group in shown) == sorted(groups)
    keys = [(len(group.members) if order == "largest" else 0, group.members[0].seen) for group in shown]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize("cursor", ["", "5", "a.b", "1.-2", "1.2.3"])
def test_a_cursor_that_is_none_is_refused(cursor: str) -> None:
    with pytest.raises(ValueError, match="not a cursor"):
        cut({}, "largest", 5, cursor)


def test_an_inbox_of_the_first_schema_is_taken_over(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        id = add(inbox, 1, direction(1))
    with contextlib.closing(sqlite3.connect(tmp_path / "inbox" / "inbox.sqlite3")) as connection:
        connection.execute("ALTER TABLE novelties DROP COLUMN label")
        connection.execute("ALTER TABLE novelties DROP COLUMN note")
        connection.execute("PRAGMA user_version = 1")
    with open_inbox(tmp_path) as inbox:
        found = inbox.get(id)
        assert found is not None
        assert (found.label, found.note, found.group) == (None, None, id)
        add(inbox, 2, direction(1))
        assert inbox.groups().items[0].size == 2
