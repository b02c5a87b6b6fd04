"""API keys, and the dependencies that require one of a role."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers

from service.errors import Forbidden, Unauthorized
from service.keys import ROLES, Key, digest_of
from service.wire.keys import Role

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
        digest = digest_of(secret or "")
        found = None
        for key in self._keys:  # no early exit: constant time
            if compare_digest(key.digest, digest):
                found = key
        return found

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


UNAUTHORIZED = "send a key that this server knows: Authorization: Bearer <key>"

require_predict_key = require_key("predict")
AnyKey = Annotated[Key, Depends(require_key())]
PredictKey = Annotated[Key, Depends(require_predict_key)]
LabelKey = Annotated[Key, Depends(require_key("label"))]
OperateKey = Annotated[Key, Depends(require_key("operate"))]
