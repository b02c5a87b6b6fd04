"""The log of promotions: `promotions/000000001.json`, `promotions/000000002.json`, ... One value per promotion.

A promotion is logged *before* `CURRENT` is replaced (write-ahead), so every current version is in the log. A kill in
between leaves an entry without effect, and so does a writer that another one was faster than; `effective` omits them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from models.storage import Storage

FOLDER = "promotions/"
Promoter = Literal["trainer", "operator"]


class Promotion(BaseModel):
    """An entry of the log: `version` became current in place of `previous`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: AwareDatetime
    version: int
    previous: int | None
    by: Promoter
    reason: str


class PromotionLog:
    """Reads each entry once: entries never change."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._read: dict[str, Promotion] = {}

    def entries(self) -> list[Promotion]:
        """All entries, oldest first, also those without effect; damaged ones are left out."""
        keys = self._keys()
        self._storage.prefetch(key for key in keys if key not in self._read)
        for key in keys:
            if key not in self._read:
                with suppress(FileNotFoundError, ValidationError):
                    self._read[key] = Promotion.model_validate_json(self._storage.get(key))
        return [self._read[key] for key in keys if key in self._read]

    def append(self, promotion: Promotion, after: int | None = None) -> int:
        """Add an entry, and return its number; `after` is the number of an earlier one, by default of the last."""
        data = promotion.model_dump_json().encode()
        number = self.last_number() if after is None else after
        while True:
            number += 1
            if self._storage.put_if_absent(entry_key(number), data):
                return number

    def last_number(self) -> int:
        keys = self._keys()
        return _number(keys[-1]) if keys else 0

    def _keys(self) -> list[str]:
        return sorted(found.key for found in self._storage.list(FOLDER) if re.fullmatch(_ENTRY, found.key))


def effective(entries: Sequence[Promotion], current: int | None) -> list[Promotion]:
    """The promotions that took effect. Read `current` before the entries: a promotion in between hides nothing then.

    From the last one backwards, each promoted the version that the next one replaced. Behind a lost entry the search
    goes on with an entry that the one after it replaced.
    """
    found: list[Promotion] = []
    wanted, follower = current, current
    first = {entry.version: i for i, entry in reversed([*enumerate(entries)])}
    for i, entry in reversed([*enumerate(entries)]):
        lost = wanted is None or first.get(wanted, len(entries)) > i
        if entry.version == (follower if lost else wanted):
            found.append(entry)
            wanted = entry.previous
        follower = entry.previous
    return found[::-1]


_ENTRY = rf"{FOLDER}[0-9]{{9,}}\.json"


def entry_key(number: int) -> str:
    return f"{FOLDER}{number:09d}.json"


def _number(key: str) -> int:
    return int(key.removeprefix(FOLDER).removesuffix(".json"))
