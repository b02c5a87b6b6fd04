"""The keyring of a server, and the dependencies that require a key of a role."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers

from models.errors import StoreError
from service.errors import Forbidden, Unauthorized
from service.key_store import KeyStore
from service.keys import ROLES, Key, digest_of
from service.wire.keys import Role

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0  # between two looks at the file with the keys

# The caller of a server without keys, which listens on loopback only.
ANONYMOUS = Key("anonymous", ROLES, b"")


class Keyring:
    """All keys of a server: those of its settings, and those of its data folder, which may change at any time.

    Without keys every request is anonymous and has every role. A server that had a key stays locked: when its last key
    is revoked, it answers no request, instead of every request. A server with shared keys is locked from the start.
    """

    def __init__(
        self, keys: tuple[Key, ...], store: KeyStore | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """StoreError if the keys of the data folder cannot be read."""
        self._settings_keys, self._store, self._clock = keys, store, clock
        self._keys, self._locked = keys, bool(keys) or (store is not None and store.shared)
        self._fingerprint: object = None
        self._stopping = threading.Event()
        # Not of the event loop's pool: a revocation must not wait for threads that wait for Redis.
        self._thread = threading.Thread(target=self._watch, name="keys", daemon=True)
        if store is not None:
            self._fingerprint = store.fingerprint()
            self._read(store)

    def __bool__(self) -> bool:
        """Whether requests need a key."""
        return self._locked

    def start(self) -> None:
        """Read the keys of the data folder again when they change."""
        if self._store is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(RELOAD_SECONDS)

    def _watch(self) -> None:
        while not self._stopping.wait(RELOAD_SECONDS):
            self.reload()

    def reload(self) -> None:
        """Read the keys of the data folder if they have changed. Keeps the present ones if they cannot be read."""
        if self._store is None:
            return
        try:
            fingerprint = self._store.fingerprint()
            if fingerprint == self._fingerprint:
                return
            self._fingerprint = fingerprint  # also on failure, which is logged once per change of the file
            self._read(self._store)
            log.info("the keys have changed: %d are in use", len(self._keys))
        except (StoreError, OSError) as error:
            log.error("the keys stay as they were: %s", error)

    def _read(self, store: KeyStore) -> None:
        names = {key.name for key in self._settings_keys}
        records = store.records()
        added = [record.key() for record in records if record.revoked is None]
        for key in added:
            if key.name in names:
                log.error("key %r of %s is not used: OPENWORLD_KEYS has one of this name", key.name, store.place)
        self._keys = (*self._settings_keys, *(key for key in added if key.name not in names))
        self._locked = self._locked or bool(records)

    def find(self, secret: str | None) -> Key | None:
        """The valid key with this secret. The time it takes depends on neither the secret nor the key."""
        if not self._locked:
            return ANONYMOUS
        digest, now = digest_of(secret or ""), self._clock()
        found = None
        for key in self._keys:  # no early exit: constant time
            if compare_digest(key.digest, digest):
                found = key
        return None if found is None or (found.expires is not None and now >= found.expires) else found

    def authenticate(self, headers: Headers) -> Key | None:
        """The key of a request, sent as `Authorization: Bearer ...` or `X-API-Key: ...`."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        return self.find(secret.strip() if scheme.lower() == "bearer" else headers.get("x-api-key"))


def require_key(role: Role | None = None) -> Callable[[Request], Awaitable[Key]]:
    """A dependency: the key of the request, which must have the role; None accepts every key."""

    async def required_key(request: Request) -> Key:
        key: Key | None = request.scope["key"]  # set by RequestGuard
        if key is None:
            raise Unauthorized(UNAUTHORIZED)
        if role is not None and role not in key.roles:
            raise Forbidden(f"key {key.name!r} has the roles {', '.join(sorted(key.roles))}, this needs {role!r}")
        request.scope.setdefault("log_fields", {})["client"] = key.name
        return key

    return required_key


UNAUTHORIZED = "send a valid key, which has not expired: Authorization: Bearer <key>"

require_predict_key = require_key("predict")
AnyKey = Annotated[Key, Depends(require_key())]
PredictKey = Annotated[Key, Depends(require_predict_key)]
LabelKey = Annotated[Key, Depends(require_key("label"))]
OperateKey = Annotated[Key, Depends(require_key("operate"))]
