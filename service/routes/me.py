"""`GET /me`: the roles of the caller's key, for the console."""

from __future__ import annotations

from fastapi import APIRouter

from service.container import ContainerDep
from service.http.auth import AnyKey
from service.http.problems import documented
from service.wire.keys import Me

router = APIRouter(tags=["people"])


@router.get("/me", summary="The name and the roles of this key", responses=documented(401))
async def me(container: ContainerDep, key: AnyKey) -> Me:
    return Me(keys_needed=bool(container.keyring), name=key.name, roles=sorted(key.roles), keep=container.keep)
