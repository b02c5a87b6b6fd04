"""GET /me: who is asking and what they may do, so that a page shows nobody what they may not."""

from __future__ import annotations

from fastapi import APIRouter

from service.container import ContainerDep
from service.http.auth import AnyKey
from service.http.problems import documented
from service.wire.keys import Me

router = APIRouter(tags=["people"])


@router.get("/me", summary="Whose key this is, and what it may do", responses=documented(401))
async def me(container: ContainerDep, key: AnyKey) -> Me:
    return Me(keys_needed=bool(container.keyring), name=key.name, roles=sorted(key.roles))
