"""Every novelty is in exactly one group of similar novelties, and stays there."""

from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.inbox import Inbox, InboxLimits, NoveltyFilter
from service.inbox.index import GROUP_BITS, NoveltyIndex, SimilarityGroups
from service.inbox.pages import ordered_groups
from service.inbox.records import IndexEntry, ListedNovelty
from service.inbox.similarity import PLAIN_COSINE, EmbeddingScale, unit_vector
from tests.support.images import make_image
from tests.support.inbox import Clock, Vector, clusters, open_inbox, random_direction, sighting


def test_the_index_finds_the_nearest_similar_entry_while_entries_are_added_and_removed() -> None:
    generator = np.random.default_rng(0)
    index = NoveltyIndex(3000)
    entries: dict[str, tuple[int, Vector | None, bool]] = {}
    for step in range(3000):
        if entries and generator.random() < 0.3:
            gone = str(generator.choice(list(entries)))
            index.remove(gone)
            del entries[gone]
            continue
        # Few bits and few directions, so that similar entries are common.
        length = int(generator.integers(0, 4))
        vector = unit_vector(generator.choice([-1.0, 1.0], length)) if length else None
        hash, foldable = int(generator.integers(0, 2**12)) << 50, bool(generator.random() < 0.8)
        wanted = [
            (hash ^ other).bit_count()
            for other, direction, other_foldable in entries.values()
            if other_foldable
            and (hash ^ other).bit_count() <= 2
            and (vector is None or direction is None or len(vector) != len(direction) or vector @ direction >= 0.9)
        ]
        found = index.find_similar(hash, vector, 2, 0.9)
        assert (found is None) == (not wanted)
        if found is not None:
            assert (hash ^ entries[found][0]).bit_count() == min(wanted)
        index.add(IndexEntry(str(step), "new" if foldable else "labelled", 10, hash, vector))
        entries[str(step)] = (hash, vector, foldable)
    assert len(index) == len(entries)
    assert index.bytes == 10 * len(entries)


# Groups


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
def test_every_novelty_stays_in_exactly_one_group(steps: list[tuple[str, int, int | None, int]]) -> None:
    groups, embeddings, first = SimilarityGroups(12), {}, {}
    for step, number, length, seed in steps:
        id = f"entry {number}"
        if step == "add" and id not in embeddings:
            embedding = None if length is None else random_direction(seed, length)
            embeddings[id] = embedding
            first[id] = groups.add(id, seed * 0x1111_1111_1111, embedding)
        elif step == "remove" and id in embeddings:
            groups.remove(id, embeddings.pop(id))
            del first[id]
        assert {id: groups.group_of(id) for id in embeddings} == first
        members = [member for group in set(first.values()) for member in groups.members(group)]
        assert sorted(members) == sorted(embeddings)
        assert len(groups) == len(set(first.values()))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 0.6)), min_size=1, max_size=60))
def test_a_groups_vector_is_the_sum_of_its_members(picks: list[tuple[int, float]]) -> None:
    groups, vectors = SimilarityGroups(100), {}
    for number, (seed, noise) in enumerate(picks):
        vector = unit_vector(random_direction(seed) + noise * random_direction(100 + number))
        assert vector is not None
        vectors[f"{number}"] = vector
        groups.add(f"{number}", 0, vector)
    for id in list(vectors)[::3]:
        groups.remove(id, vectors.pop(id))
    for name, row in groups._row.items():
        expected = sum(vectors[id] for id in groups.members(name))
        np.testing.assert_allclose(groups._vectors[row], expected, atol=1e-5)
        np.testing.assert_allclose(groups._norms[row], np.linalg.norm(expected), rtol=1e-4)


def test_a_novelty_joins_the_nearest_group_within_the_threshold() -> None:
    axes = np.eye(4, dtype=np.float32)
    for cosine, expected in ((0.99, "axis 2"), (PLAIN_COSINE + 0.01, "axis 2"), (PLAIN_COSINE - 0.01, "entry")):
        groups = SimilarityGroups(100)
        assert [groups.add(f"axis {i}", 0, axes[i]) for i in range(3)] == ["axis 0", "axis 1", "axis 2"]
        between = unit_vector(0.1 * axes[0] + axes[3])
        assert between is not None
        entry = unit_vector(cosine * axes[2] + np.sqrt(1 - cosine**2) * between)
        assert groups.add("entry", 0, entry) == expected
        assert "entry" in groups.members(expected)
    assert groups.members("unknown") == ()


def test_without_an_embedding_the_hash_of_the_first_member_decides() -> None:
    groups = SimilarityGroups(100)
    assert groups.add("a", 0, None) == "a"
    assert groups.add("b", (1 << GROUP_BITS) - 1, None) == "a"
    # One bit too far from `a`. That `b` is near does not count, or groups would drift.
    assert groups.add("c", (1 << (GROUP_BITS + 1)) - 1, None) == "c"
    assert groups.add("seen", 0xFFFF_0000_0000, random_direction(1)) == "seen"
    assert groups.add("d", 0xFFFF_0000_0001, None) == "seen"
    # With an embedding, hashes are not compared.
    assert groups.add("e", 0, -random_direction(1)) == "e"


def test_embeddings_of_another_length_are_never_compared() -> None:
    groups = SimilarityGroups(100)
    groups.add("short", 0, random_direction(1, 4))
    padded = np.concatenate([random_direction(1, 4), np.zeros(4, np.float32)])
    assert groups.add("long", 0, padded) == "long"
    assert groups.add("short again", 0, random_direction(1, 4)) == "short"


def test_a_group_keeps_its_id_without_its_first_member_which_may_join_again() -> None:
    groups = SimilarityGroups(100)
    north, south = random_direction(1), -random_direction(1)
    groups.add("first", 0, north)
    groups.add("second", 0, north)
    groups.remove("first", north)
    assert groups.add("third", 0, north) == "first"
    assert groups.add("first", 0, south) == "first"
    assert groups.members("first") == ("second", "third", "first")


def test_groups_of_pooled_features_are_nearly_pure() -> None:
    images = clusters(classes=30, each=40, dimensions=256, spread=0.3)
    groups = SimilarityGroups(len(images))
    label = {}
    for number, (c, vector) in enumerate(images):
        label[f"{number}"] = c
        groups.add(f"{number}", 0, vector)
    most = [Counter(label[id] for id in groups.members(name)).most_common(1)[0][1] for name in groups._ids]
    assert sum(most) / len(images) > 0.97
    assert 30 <= len(groups) <= 150


# On a scale


def with_common_part(classes: int, each: int) -> tuple[list[tuple[int, Vector]], EmbeddingScale]:
    """Shuffled pairs of class and embedding, and the scale that suits them.

    An embedding has a part that all classes have in common, a part of its class, and dimensions that vary at random.
    """
    rng = np.random.default_rng(0)
    common, own = 6 * random_direction(1, 24), np.eye(24)[:classes] * 1.5
    spread = np.concatenate([np.full(16, 0.1), np.full(8, 1.0)])
    out = []
    for number in rng.permutation(classes * each):
        vector = unit_vector(common + own[number % classes] + rng.normal(0, spread))
        assert vector is not None
        out.append((int(number) % classes, vector))
    vectors = np.array([vector for _, vector in out])
    return out, EmbeddingScale(vectors.mean(axis=0), (1 / spread**2).astype(np.float32))


def purity(images: list[tuple[int, Vector]], scale: EmbeddingScale | None) -> tuple[int, float]:
    """(groups, share of images that are of their group's commonest class)"""
    groups = SimilarityGroups(len(images), scale)
    label = {str(number): c for number, (c, _) in enumerate(images)}
    for number, (_, vector) in enumerate(images):
        groups.add(str(number), 0, vector)
    most = [Counter(label[id] for id in groups.members(name)).most_common(1)[0][1] for name in groups._ids]
    return len(groups), sum(most) / len(images)


def test_a_scale_separates_classes_that_have_much_in_common() -> None:
    images, scale = with_common_part(classes=6, each=20)
    assert purity(images, scale) == (6, 1.0)
    assert purity(images, None)[1] < 0.5
    only_centred = EmbeddingScale(scale.centre, np.ones_like(scale.weights))
    only_weighted = EmbeddingScale(np.zeros_like(scale.centre), scale.weights)
    for part in (only_centred, only_weighted):
        assert purity(images, part) != (6, 1.0)


def test_groups_keep_their_members_on_another_scale_and_are_compared_on_it() -> None:
    images, scale = with_common_part(classes=6, each=20)
    groups = SimilarityGroups(200)
    for number, (_, vector) in enumerate(images[:60]):
        group = groups.add(str(number), 0, vector)
        assert group == "0"  # without a scale all are alike
    groups.use_scale(scale)
    for number, (_, vector) in enumerate(images[60:], 60):
        groups.add(str(number), 0, vector)
    first, *others = ([images[int(id)][0] for id in groups.members(name)] for name in groups._ids)
    assert len(first) < 75
    assert all(len(set(classes)) == 1 for classes in others)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=30))
def test_the_cosine_on_a_scale_is_that_of_centred_and_weighted_vectors(picks: list[tuple[int, bool]]) -> None:
    rng = np.random.default_rng(len(picks))
    scale = EmbeddingScale(random_direction(99) / 2, rng.uniform(0.5, 2, 8).astype(np.float32), least_cosine=0.4)
    groups, vectors = SimilarityGroups(100, scale), dict[str, Vector]()

    def scaled(total: Vector, count: int) -> Vector:
        out: Vector = np.sqrt(scale.weights) * (total - count * scale.centre)
        return out / np.linalg.norm(out)

    for number, (seed, removed) in enumerate(picks):
        vector = unit_vector(random_direction(seed) + 0.5 * random_direction(100 + number))
        assert vector is not None
        members = {name: groups.members(name) for name in groups._ids}
        cosines = {
            name: float(scaled(sum(vectors[id] for id in ids), len(ids)) @ scaled(vector, 1))
            for name, ids in members.items()
        }
        group = groups.add(str(number), 0, vector)
        vectors[str(number)] = vector
        best = max(cosines, key=lambda name: cosines[name]) if cosines else None
        if best is not None and abs(cosines[best] - 0.4) > 1e-3:
            assert group == (best if cosines[best] > 0.4 else str(number))
        if removed and len(vectors) > 1:
            gone = next(iter(vectors))
            groups.remove(gone, vectors.pop(gone))


def test_an_inbox_is_opened_with_the_groups_of_the_scale_in_use(tmp_path: Path) -> None:
    images, scale = with_common_part(classes=3, each=4)
    limits = InboxLimits(rate=1e6, burst=10**6)

    def opened(scale: EmbeddingScale | None) -> closing[Inbox]:
        return closing(Inbox(tmp_path, limits, Clock(), scale=lambda: scale))

    with opened(scale) as inbox:
        for number, (_, vector) in enumerate(images):
            add(inbox, number, vector)
        assert len(inbox.groups().items) == 3
    for used, groups in ((scale, 3), (None, 1), (scale, 3)):
        with opened(used) as inbox:
            assert len(inbox.groups().items) == groups


# In the inbox


def add(inbox: Inbox, number: int, embedding: Vector | None = None) -> str:
    result = inbox.add(sighting(make_image(number), number, None if embedding is None else list(embedding)))
    assert result.outcome == "new"
    assert result.id is not None
    return result.id


def test_a_reopened_inbox_has_the_same_groups(tmp_path: Path) -> None:
    def seen(inbox: Inbox) -> list[tuple[str, tuple[str, ...]]]:
        return [(group.id, group.ids) for group in inbox.groups(limit=200).items]

    with open_inbox(tmp_path, rate=1e6, burst=10**6) as inbox:
        for number, (_, vector) in enumerate(clusters(6, 8, 32, 0.3)):
            add(inbox, number, vector if number % 5 else None)
        before = seen(inbox)
    with open_inbox(tmp_path) as inbox:
        assert seen(inbox) == before
        inbox.delete([before[0][0]])
        left = dict(seen(inbox))[before[0][0]]
        assert left == before[0][1][:-1]
    with open_inbox(tmp_path) as inbox:
        # The id is that of the oldest remaining member, and the members are the same.
        renamed = next((id, ids) for id, ids in seen(inbox) if set(ids) == set(left))
        assert renamed[0] == left[-1]


def test_groups_list_the_newest_members_of_a_state(tmp_path: Path) -> None:
    clock = Clock()
    with open_inbox(tmp_path, clock, rate=1e6, burst=10**6) as inbox:
        large, small = [], []
        for number in range(12):
            clock.now += 1
            large.append(add(inbox, number, random_direction(1)))
        for number in range(20, 23):
            clock.now += 1
            small.append(add(inbox, number, -random_direction(1)))
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
        page = inbox.list(only=NoveltyFilter(group=small[0]))
        assert [item.id for item in page.items] == small[::-1]
        assert inbox.list(only=NoveltyFilter(group="unknown")).items == ()


def test_an_empty_inbox_has_no_groups(tmp_path: Path) -> None:
    with open_inbox(tmp_path) as inbox:
        assert inbox.groups().items == ()
        with pytest.raises(ValueError, match="at least 1"):
            inbox.groups(limit=0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=12), st.sampled_from(["largest", "newest"]), st.integers(1, 5))
def test_pages_list_every_group_once_in_order(sizes: list[int], order: str, limit: int) -> None:
    rng = np.random.default_rng(sum(sizes))
    numbers = iter(rng.permutation(sum(sizes)).tolist())
    groups = {}
    for name, size in enumerate(sizes):
        seen = sorted((next(numbers) for _ in range(size)), reverse=True)
        groups[f"{name}"] = [ListedNovelty(f"{one}", one, float(one)) for one in seen]
    shown, before = [], None
    while True:
        page, before = ordered_groups(groups, order, limit, before)  # type: ignore[arg-type]
        assert len(page) <= limit
        shown += page
        if before is None:
            break
    assert sorted(group for group, _ in shown) == sorted(groups)
    keys = [(len(members) if order == "largest" else 0, members[0].seen) for _, members in shown]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize("cursor", ["", "5", "a.b", "1.-2", "1.2.3"])
def test_an_invalid_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(ValueError, match="not a cursor"):
        ordered_groups({}, "largest", 5, cursor)
