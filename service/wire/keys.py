"""`GET /me`: roles of API keys."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["predict", "label", "operate", "monitor"]
Keep = Literal["images", "features", "statistics"]


class Me(BaseModel):
    """The key of this request."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"keys_needed": True, "name": "anna", "roles": ["label", "predict"]}]}
    )

    keys_needed: bool = Field(description="false: this server has no keys, every request has all roles")
    name: str
    roles: list[Role]
    keep: Keep = Field("images", description="what the data folder keeps of taught images; see docs/privacy.md")
