"""Pages of likeness groups: which groups have novelties in a state, in which order, and what to show of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from service.inbox.groups import LikenessGroups
from service.inbox.records import Group, GroupPage, Novelty
from service.inbox.rows import Listed
from service.inbox.table import InboxTable
from service.wire.novelties import GroupOrder, NoveltyState

IDS, SAMPLES = 200, 8  # of a group that are shown


def group_page(
    table: InboxTable, groups: LikenessGroups, state: NoveltyState, limit: int, before: str | None, order: GroupOrder
) -> GroupPage:
    """Only members in the state count, and groups without one are left out."""
    found: dict[str, list[Listed]] = {}
    for listed in table.listed(state):
        found.setdefault(groups.of(listed.id), []).append(listed)
    page, next_cursor = cut(found, order, limit, before)
    shown = table.named(one.id for group in page for one in group.members[:SAMPLES])
    return GroupPage(tuple(_group(group, shown) for group in page), next_cursor)


def _group(group: Cut, shown: Mapping[str, Novelty]) -> Group:
    return Group(
        id=group.id,
        size=len(group.members),
        newest_seen=group.members[0].last_seen,
        ids=tuple(one.id for one in group.members[:IDS]),
        samples=tuple(replace(shown[one.id], group=group.id) for one in group.members[:SAMPLES]),
    )


class Cut(NamedTuple):
    """One group of a page: its members in some state, newest first."""

    id: str
    members: Sequence[Listed]


def cut(
    groups: dict[str, list[Listed]], order: GroupOrder, limit: int, before: str | None
) -> tuple[list[Cut], str | None]:
    """A page of groups and the cursor of the next; members come newest first.

    `largest` orders by size and then by the newest member, `newest` by the newest member alone. The cursor holds both
    numbers of the last group shown: one that grew meanwhile has moved to the front, and is not met twice.
    """

    def key(group: Cut) -> tuple[int, int]:
        return (len(group.members) if order == "largest" else 0, group.members[0].seen)

    found = [Cut(name, members) for name, members in groups.items()]
    if before is not None:
        size, seen = _read_cursor(before)
        found = [group for group in found if key(group) < (size if order == "largest" else 0, seen)]
    found.sort(key=key, reverse=True)
    page = found[:limit]
    more = len(found) > limit
    return page, f"{len(page[-1].members)}.{page[-1].members[0].seen}" if more else None


def _read_cursor(text: str) -> tuple[int, int]:
    size, dot, seen = text.partition(".")
    if not (dot and size.isdecimal() and seen.isdecimal()):
        raise ValueError(f"{text[:80]!r} is not a cursor of groups")
    return int(size), int(seen)
