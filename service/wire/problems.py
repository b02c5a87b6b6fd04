"""Error bodies: RFC 9457 problem details."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Problem(BaseModel):
    """Why a request failed (RFC 9457): `code` is for programs, `detail` for people."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "The image format is not supported",
                    "status": 415,
                    "code": "unsupported_image",
                    "detail": "the bytes are not a supported image: send JPEG, PNG or WebP",
                    "request_id": "0193f1c2a4b7c0ffee12",
                }
            ]
        }
    )

    type: str = "about:blank"
    title: str = Field(description="the kind of problem, the same for every `code`")
    status: int
    code: str = Field(description="stable: programs may depend on it")
    detail: str = Field(description="what is wrong with this request, and how to correct it")
    request_id: str | None = Field(None, description="also in the header X-Request-ID and in the server's log")
    errors: list[dict[str, Any]] | None = Field(None, description="each problem, when there are several")
