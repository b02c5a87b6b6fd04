"""Pages of the inbox: novelties and their groups, as a labeller lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from service.inbox.index import NoveltyIndex
from service.inbox.records import Group, GroupPage, ListedNovelty, Novelty, NoveltyFilter, NoveltyPage
from service.inbox.table import InboxTable
from service.wire.novelties import GroupOrder, NoveltyState

GROUP_IDS, GROUP_SAMPLES = 200, 8  # shown per group


def check_limit(limit: int) -> None:
    """Of the length of a page."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")


def with_group(novelty: Novelty, index: NoveltyIndex) -> Novelty:
    return replace(novelty, group=index.groups.group_of(novelty.id))


def page_of_novelties(
    table: InboxTable, index: NoveltyIndex, state: NoveltyState, limit: int, before: int | None, only: NoveltyFilter
) -> NoveltyPage:
    members = None if only.group is None else index.groups.members(only.group)
    page = table.page(state, limit, before, only, members)
    return replace(page, items=tuple(with_group(item, index) for item in page.items))


def page_of_groups(
    table: InboxTable, index: NoveltyIndex, state: NoveltyState, limit: int, before: str | None, order: GroupOrder
) -> GroupPage:
    groups: dict[str, list[ListedNovelty]] = {}
    for novelty in table.listed(state):
        groups.setdefault(index.groups.group_of(novelty.id), []).append(novelty)
    page, next_cursor = ordered_groups(groups, order, limit, before)
    samples = table.get(one.id for _, members in page for one in members[:GROUP_SAMPLES])
    items = [
        Group(
            id=id,
            size=len(members),
            newest_seen=members[0].last_seen,
            ids=tuple(one.id for one in members[:GROUP_IDS]),
            samples=tuple(with_group(samples[one.id], index) for one in members[:GROUP_SAMPLES]),
        )
        for id, members in page
    ]
    return GroupPage(tuple(items), next_cursor)


def ordered_groups(
    groups: Mapping[str, Sequence[ListedNovelty]], order: GroupOrder, limit: int, before: str | None
) -> tuple[list[tuple[str, Sequence[ListedNovelty]]], str | None]:
    """Some groups with their members (newest first), and the cursor of the next page.

    `largest` orders by size and then by the newest member, `newest` by the newest member. The cursor has both numbers
    of the page's last group: a group that has grown since moves to the front, and is not shown twice.
    """

    def key(size: int, seen: int) -> tuple[int, int]:
        return (size if order == "largest" else 0, seen)

    found = [(key(len(members), members[0].seen), group) for group, members in groups.items()]
    if before is not None:
        size, dot, seen = before.partition(".")
        if not (dot and size.isdecimal() and seen.isdecimal()):
            raise ValueError(f"{before[:80]!r} is not a cursor of groups")
        found = [one for one in found if one[0] < key(int(size), int(seen))]
    found.sort(reverse=True)
    page = [(group, groups[group]) for _, group in found[:limit]]
    if len(found) <= limit:
        return page, None
    last = page[-1][1]
    return page, f"{len(last)}.{last[0].seen}"
