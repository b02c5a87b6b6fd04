"""The keys that all servers of a data folder share: their hashes in Redis, `<prefix>:keys`.

**While Redis does not answer, the last known keys go on working**, also after a restart: every server has a copy in its
data folder. A server that has never read them accepts the keys of its settings only; it never becomes open.
"""

from __future__ import annotations

import logging
from pathlib import Path

from models.errors import OpenWorldError, StoreError
from models.files import write_durable
from service.key_store import SHARED_COPY, Change, KeyRecord, KeyStore, KeysUnconfirmed, packed, unpacked
from service.shared.redis_state import RedisState
from tasks.errors import QueueUnavailable

log = logging.getLogger(__name__)

KEYS = "keys"
CONFIRM_SECONDS = 1.0


class SharedKeyStore(KeyStore):
    """A `KeyStore` in Redis."""

    shared = True

    def __init__(self, data: Path, state: RedisState, replicas: int = 0) -> None:
        """A change returns once `replicas` of Redis have it: a revoked key must not return after a failure."""
        super().__init__(data)
        self.place = "Redis"
        self._state, self._replicas = state, replicas
        self._copy = data / SHARED_COPY
        self._known: bytes | None = None
        self._away = False

    def records(self) -> list[KeyRecord]:
        """The keys in Redis; the last known ones while it does not answer."""
        document = self._document()
        return unpacked(document, "Redis") if document else []

    def fingerprint(self) -> object:
        return self._document()

    def _document(self) -> bytes:
        try:
            found = self._state.get(KEYS) or b""
        except QueueUnavailable as error:
            if not self._away:
                log.warning("the keys stay as they were, because Redis does not answer: %s", error)
            self._away = True
            return self._last_known()
        self._away = False
        if found != self._known:
            self._known = found
            try:
                write_durable(self._copy, found)
            except OSError as error:
                log.error("the keys cannot be copied to %s for an outage of Redis: %s", self._copy, error)
        return found

    def _last_known(self) -> bytes:
        if self._known is not None:
            return self._known
        try:
            return self._copy.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreError(f"the copy of the keys in {self._copy} cannot be read: {error}") from error

    def _change(self, change: Change) -> None:
        try:
            while True:
                before = self._state.get(KEYS) or b""
                after = packed(change(unpacked(before, "Redis") if before else []))
                if self._state.run("keys_replace", before, after):
                    break
        except QueueUnavailable as error:
            raise OpenWorldError(
                "Redis does not answer, and the shared keys may not have been changed: see `openworld keys list` "
                f"({error})"
            ) from error
        try:
            confirmed = self._state.confirmed(self._replicas, CONFIRM_SECONDS)
        except QueueUnavailable as error:
            raise self._unconfirmed("none") from error
        if confirmed < self._replicas:
            raise self._unconfirmed(confirmed)

    def _unconfirmed(self, confirmed: int | str) -> KeysUnconfirmed:
        return KeysUnconfirmed(
            f"the keys were changed, but {confirmed} of {self._replicas} replicas of Redis have confirmed it, so a "
            "failure may undo it: check Redis, then see `openworld keys list`"
        )
