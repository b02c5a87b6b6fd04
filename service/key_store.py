"""The keys that `openworld keys` manages: a file in the data folder with the hashes of their secrets.

A secret is generated and has 256 random bits, so its SHA-256 cannot be found by guessing. Servers read the file again
when it changes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from models.errors import OpenWorldError, StoreError
from models.files import file_lock, write_durable
from models.versions.data_format import open_data_folder
from service.keys import NAME, Key, digest_of
from service.wire.keys import Role

FILE, LOCK = "keys.json", ".keys.lock"
SHARED_COPY = "shared-keys.json"  # of the keys in Redis, if servers share them
PREFIX = "ow_"  # lets scanners of repositories recognise a secret

Change = Callable[[list["KeyRecord"]], list["KeyRecord"]]
KeyState = Literal["valid", "expired", "revoked"]


class KeysUnconfirmed(OpenWorldError):
    """The keys were changed, but a failure of Redis may undo it."""

    secret: str | None = None  # of the key that was created


class KeyRecord(BaseModel):
    """A key as the file has it. Revoked keys stay in it: their names are in the audit log and are not used again."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=f"^{NAME.pattern}$")
    roles: list[Role] = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def state(self, now: datetime) -> KeyState:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else "valid"

    def key(self) -> Key:
        expires = None if self.expires is None else self.expires.timestamp()
        return Key(self.name, frozenset(self.roles), bytes.fromhex(self.sha256), expires)


class _KeyFile(BaseModel):
    keys: list[KeyRecord]


class KeyStore:
    """The keys of a data folder, in a file. `SharedKeyStore` has them in Redis."""

    shared = False

    def __init__(self, data: Path) -> None:
        self._data, self._path = data, data / FILE
        self.place = str(data)  # for messages

    def records(self) -> list[KeyRecord]:
        """All keys, oldest first; StoreError if the file cannot be read."""
        try:
            return unpacked(self._path.read_bytes(), str(self._path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"the keys in {self._path} cannot be read ({error}): restore the file") from error

    def fingerprint(self) -> object:
        """Changes with the keys."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def create(self, name: str, roles: Collection[Role], lifetime: timedelta | None = None) -> str:
        """Add a key and return its secret, which is stored nowhere."""
        secret = PREFIX + secrets.token_urlsafe(32)
        now = datetime.now(UTC)
        record = KeyRecord(
            name=name,
            roles=sorted(roles),
            sha256=digest_of(secret).hex(),
            created=now,
            expires=None if lifetime is None else now + lifetime,
        )

        def add(records: list[KeyRecord]) -> list[KeyRecord]:
            if record in records:  # by an attempt whose answer was lost
                return records
            if any(other.name == name for other in records):
                raise OpenWorldError(f"there is or was a key {name!r}: choose another name")
            return [*records, record]

        try:
            self._change(add)
        except KeysUnconfirmed as error:
            error.secret = secret
            raise
        return secret

    def revoke(self, name: str) -> None:
        """Revoke a key; nothing happens if it is revoked."""
        now = datetime.now(UTC)

        def revoked(records: list[KeyRecord]) -> list[KeyRecord]:
            if not any(record.name == name for record in records):
                raise OpenWorldError(f"there is no key {name!r} in {self.place}: see openworld keys list")
            return [
                record.model_copy(update={"revoked": record.revoked or now}) if record.name == name else record
                for record in records
            ]

        self._change(revoked)

    def _change(self, change: Change) -> None:
        """Replace all keys at once; no change of another process is lost."""
        open_data_folder(self._data)
        with file_lock(self._data / LOCK):
            write_durable(self._path, packed(change(self.records())))


def packed(records: list[KeyRecord]) -> bytes:
    return _KeyFile(keys=records).model_dump_json(indent=1).encode()


def unpacked(data: bytes, place: str) -> list[KeyRecord]:
    """StoreError if the data are damaged."""
    try:
        return _KeyFile.model_validate_json(data).keys
    except ValidationError as error:
        raise StoreError(f"the keys in {place} cannot be read ({error.error_count()} errors): restore them") from error
