"""`GET /classes` and `PATCH /classes/{name}`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ClassEntry(BaseModel):
    """A learned class."""

    name: str
    task: int = Field(description="the task that it was learned in, from 0")
    state: Literal["active", "merged", "retired"]
    merged_into: str | None = None
    provisional: bool = Field(False, description="it answers in closed form: its task is not learned yet")


class Classes(BaseModel):
    """All classes of the current version, in the order in which they were learned."""

    version: int
    classes: list[ClassEntry]


class ClassEdit(BaseModel):
    """Exactly one of the three."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"rename": "Conference pear"}]})

    rename: str | None = Field(None, min_length=1, max_length=200, description="the new name")
    merge_into: str | None = Field(None, min_length=1, max_length=200, description="answer this class instead")
    retired: bool | None = Field(None, description="true: no longer answered; false: restore, also after a merge")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for value in (self.rename, self.merge_into, self.retired)) != 1:
            raise ValueError("give exactly one of rename, merge_into, retired")
        return self
