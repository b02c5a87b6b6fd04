"""The state of one server: `GET /livez`, `GET /readyz` and `GET /pulse`."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field


class Health(BaseModel):
    """Alive or ready."""

    model_config = ConfigDict(extra="allow")

    status: str


class Swap(BaseModel):
    """Another version became active."""

    time: datetime
    previous: int = Field(description="0: nothing was loaded")
    version: int


class PulseBucket(BaseModel):
    """One interval in which the server answered something."""

    time: datetime = Field(description="start of the interval")
    known: int
    novel: int
    errors: int = Field(description="images that could not be read")
    p50: float | None = Field(description="median seconds of the answered requests to POST /predict")
    p99: float | None = Field(description="99th percentile; both are interpolated within a histogram bucket")


class PulseAnswer(BaseModel):
    """What this server answered in the last minutes."""

    now: datetime
    seconds: int = Field(description="length of a bucket")
    version: int = Field(description="the active version; 0 while nothing is learned")
    since: datetime
    known: int
    novel: int
    errors: int
    p50: float | None
    p99: float | None
    scores: list[int] = Field(description="images by calibrated score, 20 bins (low, high]; known ones spread evenly")
    buckets: list[PulseBucket] = Field(description="oldest first; empty intervals are left out")
    swaps: list[Swap]
