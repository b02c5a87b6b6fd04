"""`GET /audit`: who changed what."""

from __future__ import annotations

from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field


class AuditEntry(BaseModel):
    """One change."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "time": "2026-01-31T12:00:00Z",
                    "by": "anna",
                    "action": "version.activate",
                    "target": "3",
                    "detail": {"reason": "too many novel images"},
                    "address": "192.0.2.7",
                    "request_id": "0193f1c2a4b7c0ffee12",
                    "status": 200,
                }
            ]
        }
    )

    time: AwareDatetime
    by: str = Field(description="the name of the key, or the user of the command line")
    action: str = Field(description="stable: programs may depend on it")
    target: str | None = Field(None, description="the task, version, class, image, novelty or key")
    detail: dict[str, Any] = Field(default_factory=dict)
    address: str | None = Field(None, description="of the client; null on the command line")
    request_id: str | None = None
    status: int | None = Field(None, description="of the response; 5xx: the change may be incomplete")


class AuditPage(BaseModel):
    """A page of the audit log."""

    items: list[AuditEntry]
    next_cursor: int | None = Field(description="`before` of the next page; null on the last page")
