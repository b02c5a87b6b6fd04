"""`GET /audit`: the audit log, for operators."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from service.container import ContainerDep
from service.http.auth import OperateKey
from service.http.problems import documented
from service.wire.audit import AuditPage

router = APIRouter(tags=["operators"])


@router.get("/audit", summary="Who changed what, newest first", responses=documented(401, 403, 422))
async def audit(
    container: ContainerDep,
    key: OperateKey,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="`next_cursor` of the previous page")] = None,
) -> AuditPage:
    return await asyncio.to_thread(container.audit_log.page, limit, before)
