"""The keys that `openworld keys` manages: a file in the data folder with the hashes of their secrets.

A secret is generated and has 256 random bits, so its SHA-256 cannot be found by guessing. Servers read the file again
when it changes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
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
PREFIX = "ow_"  # lets scanners of repositories recognise a secret

KeyState = Literal["valid", "expired", "revoked"]


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
    """The keys of a data folder."""

    def __init__(self, data: Path) -> None:
        self._data, self._path = data, data / FILE

    def records(self) -> list[KeyRecord]:
        """All keys, oldest first; StoreError if the file cannot be read."""
        try:
            return _KeyFile.model_validate_json(self._path.read_bytes()).keys
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            reason = error if isinstance(error, OSError) else f"{error.error_count()} errors"
            raise StoreError(f"the keys in {self._path} cannot be read ({reason}): restore the file") from error

    def fingerprint(self) -> tuple[int, ...] | None:
        """Changes with the file; None while there is none."""
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
        open_data_folder(self._data)
        with file_lock(self._data / LOCK):
            records = self.records()
            if any(other.name == name for other in records):
                raise OpenWorldError(f"there is or was a key {name!r}: choose another name")
            self._write([*records, record])
        return secret

    def revoke(self, name: str) -> None:
        """Revoke a key; nothing happens if it is revoked."""
        if not any(record.name == name for record in self.records()):
            raise OpenWorldError(f"there is no key {name!r} in {self._data}: see openworld keys list")
        with file_lock(self._data / LOCK):
            now = datetime.now(UTC)
            self._write(
                [
                    record.model_copy(update={"revoked": record.revoked or now}) if record.name == name else record
                    for record in self.records()
                ]
            )

    def _write(self, records: list[KeyRecord]) -> None:
        write_durable(self._path, _KeyFile(keys=records).model_dump_json(indent=1).encode())
