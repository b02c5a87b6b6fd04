"""API keys, and the dependencies that require one of a role."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Annotated, get_args

from fastapi import Depends, Request
from starlette.datastructures import Headers

from service.errors import Forbidden, Unauthorized
from service.wire.keys import Role

ROLES: frozenset[Role] = frozenset(get_args(Role))
MIN_SECRET_LENGTH = 16


@dataclass(frozen=True)
class Key:
    """A named secret with its roles. Only the secret's hash is kept, so that no log or core dump contains it."""

    name: str
    roles: frozenset[Role]
    digest: bytes

    def __repr__(self) -> str:
        return f"Key({self.name!r}, {'+'.join(sorted(self.roles))})"


# The caller of a server without keys, which listens on loopback only.
ANONYMOUS = Key("anonymous", ROLES, b"")


class Keyring:
    """All keys of a server. Without keys every request is anonymous and has every role."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._keys = keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, secret: str | None) -> Key | None:
        """The key with this secret. The time it takes depends on neither the secret nor the key."""
        if not self._keys:
            return ANONYMOUS
        digest = _digest(secret or "")
        found = None
        for key in self._keys:  # no early exit: constant time
            if compare_digest(key.digest, digest):
                found = key
        return found

    def authenticate(self, headers: Headers) -> Key | None:
        """The key of a request, sent as `Authorization: Bearer ...` or `X-API-Key: ...`."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        return self.find(secret.strip() if scheme.lower() == "bearer" else headers.get("x-api-key"))


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
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) or not secret:
            raise ValueError(f"key {position} is not name:role+role:secret (a name has letters, digits, _ . -)")
        if set(roles) - ROLES:
            raise ValueError(f"key {position} has an unknown role: choose from {', '.join(sorted(ROLES))}, joined by +")
        if len(secret) < MIN_SECRET_LENGTH:
            raise ValueError(
                f"key {position}: a secret has at least {MIN_SECRET_LENGTH} characters: openssl rand -hex 24"
            )
        digest = _digest(secret)
        if name in keys or digest in digests:
            raise ValueError(f"key {position}: every key needs its own name and its own secret")
        digests.add(digest)
        keys[name] = Key(name, frozenset(role for role in ROLES if role in roles), digest)
    return tuple(keys.values())


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


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


UNAUTHORIZED = "send a key that this server knows: Authorization: Bearer <key>"

require_predict_key = require_key("predict")
AnyKey = Annotated[Key, Depends(require_key())]
PredictKey = Annotated[Key, Depends(require_predict_key)]
LabelKey = Annotated[Key, Depends(require_key("label"))]
OperateKey = Annotated[Key, Depends(require_key("operate"))]
