"""API keys and what their holders may do."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from hmac import compare_digest
from typing import Literal, get_args

from starlette.requests import HTTPConnection

Role = Literal["predict", "label", "operate"]
ROLES: frozenset[Role] = frozenset(get_args(Role))
SHORTEST_SECRET = 16


@dataclass(frozen=True)
class Key:
    """Somebody with a secret; only its hash is kept, so that neither a log nor a crash dump tells it."""

    name: str
    roles: frozenset[Role]
    digest: bytes

    def __repr__(self) -> str:
        return f"Key({self.name!r}, {'+'.join(sorted(self.roles))})"


# Who calls when there are no keys, which only loopback can.
ANYONE = Key("anonymous", ROLES, b"")


class Keyring:
    """All keys of a server; with none, everybody who reaches it may do everything."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._keys = keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def holder(self, secret: str | None) -> Key | None:
        """Whose secret this is, in a time that depends on neither the secret nor its owner."""
        if not self._keys:
            return ANYONE
        digest = _digest(secret or "")
        found = None
        for key in self._keys:  # all of them, always
            if compare_digest(key.digest, digest):
                found = key
        return found


def secret_of(request: HTTPConnection) -> str | None:
    """What a request shows: `Authorization: Bearer ...` or `X-API-Key: ...`."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return secret.strip()
    return request.headers.get("x-api-key")


def parse_keys(text: str) -> tuple[Key, ...]:
    """`name:role+role:secret`, comma-separated.

    A ValueError names an entry by its place, never by a part of its text: who mixes up the order would read their
    secret in a log.
    """
    keys: dict[str, Key] = {}
    digests: set[bytes] = set()
    for place, entry in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
        name, _, rest = entry.partition(":")
        roles_text, _, secret = rest.partition(":")
        roles = roles_text.split("+")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) or not secret:
            raise ValueError(f"key {place} is not name:role+role:secret (a name has letters, digits, _ . -)")
        if set(roles) - ROLES:
            raise ValueError(f"key {place} has an unknown role: choose of {', '.join(sorted(ROLES))}, joined by +")
        if len(secret) < SHORTEST_SECRET:
            raise ValueError(f"key {place}: a secret has at least {SHORTEST_SECRET} characters: openssl rand -hex 24")
        digest = _digest(secret)
        if name in keys or digest in digests:
            raise ValueError(f"key {place}: every key needs a name and a secret of its own")
        digests.add(digest)
        keys[name] = Key(name, frozenset(role for role in ROLES if role in roles), digest)
    return tuple(keys.values())


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
