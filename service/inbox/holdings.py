"""What the inbox knows by heart of its rows: likeness, groups and sizes, so that adding one asks the disk nothing."""

from __future__ import annotations

from service.inbox.groups import LikenessGroups
from service.inbox.index import LikenessIndex
from service.inbox.rows import Entry
from service.wire.novelties import NoveltyState


class Holdings:
    """The rows of the table, in memory. Not thread-safe: the inbox's lock is around it."""

    def __init__(self) -> None:
        self.index = LikenessIndex()
        self.groups = LikenessGroups()
        self.bytes = 0
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, id: str) -> bool:
        return id in self._sizes

    def add(self, entry: Entry) -> None:
        self.index.add(entry.id, entry.hash, entry.embedding, _folds(entry.state))
        self.groups.add(entry.id, entry.hash, entry.embedding)
        self._sizes[entry.id] = entry.bytes
        self.bytes += entry.bytes

    def remove(self, id: str) -> None:
        self.groups.remove(id, self.index.embedding(id))
        self.index.remove(id)
        self.bytes -= self._sizes.pop(id)

    def set_state(self, id: str, state: NoveltyState) -> None:
        self.index.set_folds(id, _folds(state))


def _folds(state: NoveltyState) -> bool:
    # Into what people dismissed, too: they said that they do not want it. What they labelled should be known by now:
    # when it is seen as novel again, they should hear of it.
    return state != "labelled"
