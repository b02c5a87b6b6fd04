"""API keys, and those that `OPENWORLD_KEYS` lists. Needs no web framework: every program reads the settings' names."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import get_args

from service.wire.keys import Role

ROLES: frozenset[Role] = frozenset(get_args(Role))
MIN_SECRET_LENGTH = 16
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Key:
    """A named secret with its roles. Only the secret's hash is kept, so that no log or core dump contains it."""

    name: str
    roles: frozenset[Role]
    digest: bytes
    expires: float | None = None  # seconds since 1970

    def __repr__(self) -> str:
        return f"Key({self.name!r}, {'+'.join(sorted(self.roles))})"


def parse_keys(text: str) -> tuple[Key, ...]:
    """Parse comma-separated entries `name:role+role:secret`.

    A ValueError names an entry by its position and quotes none of its text: if name and secret are swapped, the
    secret would appear in a log.
    """
    keys: dict[str, Key] = {}
    digests: set[bytes] = set()
    for position, entry in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
        name, _, rest = entry.partition(":")
        roles_text, _, secret = rest.partition(":")
        roles = roles_text.split("+")
        if not NAME.fullmatch(name) or not secret:
            raise ValueError(f"key {position} is not name:role+role:secret (a name has letters, digits, _ . -)")
        if set(roles) - ROLES:
            raise ValueError(f"key {position} has an unknown role: choose from {', '.join(sorted(ROLES))}, joined by +")
        if len(secret) < MIN_SECRET_LENGTH:
            raise ValueError(
                f"key {position}: a secret has at least {MIN_SECRET_LENGTH} characters: openssl rand -hex 24"
            )
        digest = digest_of(secret)
        if name in keys or digest in digests:
            raise ValueError(f"key {position}: every key needs its own name and its own secret")
        digests.add(digest)
        keys[name] = Key(name, frozenset(role for role in ROLES if role in roles), digest)
    return tuple(keys.values())


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
