"""GET /me: who is asking and what they may do, so that a page shows nobody what they may not."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from service.container import ContainerDep
from service.http.auth import AnyKey, Role
from service.http.problems import documented

router = APIRouter(tags=["people"])


class Me(BaseModel):
    """The holder of the key that the request came with."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"keys_needed": True, "name": "anna", "roles": ["label", "predict"]}]}
    )

    keys_needed: bool = Field(description="false: this server has no keys, and everybody may do everything")
    name: str
    roles: list[Role]


@router.get("/me", summary="Whose key this is, and what it may do", responses=documented(401))
async def me(container: ContainerDep, key: AnyKey) -> Me:
    return Me(keys_needed=bool(container.keyring), name=key.name, roles=sorted(key.roles))
