"""`/novelties`: the inbox."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from service.wire.predictions import Nearest

NoveltyState = Literal["new", "labelled", "dismissed"]
GroupOrder = Literal["largest", "newest"]
AddOutcome = Literal["new", "folded", "dropped"]

NoveltyId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
PredictionId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]

_SHA = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_PREDICTION = "0193f1c2a4b7c0ffee120002"
_NOVELTY: dict[str, Any] = {
    "id": _SHA,
    "group": _SHA,
    "state": "new",
    "first_seen": "2025-01-01T12:00:00Z",
    "last_seen": "2025-01-01T12:00:07Z",
    "count": 3,
    "label": "apple",
    "version": 7,
    "score": -19.8,
    "calibrated_score": 0.01,
    "p_novel": 0.97,
    "nearest": [{"label": "apple", "share": 0.02}, {"label": "pear", "share": 0.01}],
    "prediction_id": _PREDICTION,
    "client": "robot-3",
    "bytes": 48213,
    "width": 640,
    "height": 480,
    "note": "a quince, not an apple",
}


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


class NoveltyAnswer(BaseModel):
    """One novelty: the image of its first sighting, the answer of its newest sighting."""

    model_config = _example(**_NOVELTY)

    id: str = Field(description="the sha256 of its bytes")
    group: str | None = Field(description="the group of similar novelties: GET /novelties?group=")
    state: NoveltyState
    first_seen: datetime
    last_seen: datetime
    count: int = Field(description="sightings, including folded ones")
    label: str | None = Field(description="the class that was answered, when a person reported it as wrong")
    version: int = Field(description="the version that answered; 0 while nothing is learned")
    score: float | None
    calibrated_score: float
    p_novel: float
    nearest: list[Nearest] = Field(description="the most similar known classes, best first, by their present labels")
    prediction_id: str
    client: str = Field(description="the name of the key that sent it")
    bytes: int
    width: int = Field(description="of the image as sent, upright")
    height: int
    note: str | None = Field(description="the note of the person that reported it")


class Novelties(BaseModel):
    """Some novelties, last seen first."""

    model_config = _example(items=[_NOVELTY], next_cursor=4711)

    items: list[NoveltyAnswer]
    next_cursor: int | None = Field(description="pass it as `before` for the next page; null on the last page")


class NoveltyGroup(BaseModel):
    """Similar novelties, to be labelled together."""

    id: str = Field(description="the group's first novelty; constant while the server runs")
    size: int = Field(description="novelties in the requested state")
    newest_seen: datetime
    ids: list[str] = Field(description="last seen first, at most 200; GET /novelties?group= lists all")
    samples: list[NoveltyAnswer] = Field(description="the first 8 novelties")


class NoveltyGroups(BaseModel):
    """Some groups, in the requested order."""

    model_config = _example(
        items=[
            {"id": _SHA, "size": 12, "newest_seen": "2025-01-01T12:00:07Z", "ids": [_SHA], "samples": [_NOVELTY]},
        ],
        next_cursor="12.4711",
    )

    items: list[NoveltyGroup]
    next_cursor: str | None = Field(description="pass it as `before` for the next page; null on the last page")


class NoveltyIds(BaseModel):
    """The novelties to change."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"ids": [_SHA]}]})

    ids: list[NoveltyId] = Field(min_length=1, max_length=5000)


class ChangedNovelties(BaseModel):
    """The novelties that changed state; ids in neither list were in another state and stay as they are."""

    model_config = _example(changed=[_SHA], missing=[])

    changed: list[str]
    missing: list[str] = Field(description="not in the inbox: deleted, evicted, or never there")


class ReportedPredictions(BaseModel):
    """Predictions that a person reports as wrong or novel."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"prediction_ids": [_PREDICTION], "note": "a quince, not an apple"}]},
    )

    prediction_ids: list[PredictionId] = Field(min_length=1, max_length=200)
    note: str | None = Field(None, max_length=500, description="shown to the people that label")


class ReportResult(BaseModel):
    """What happened to one reported prediction."""

    prediction_id: str
    novelty_id: str | None = Field(description="null when it was dropped")
    outcome: AddOutcome = Field(description="folded: the inbox already had these bytes")
    reason: str | None = Field(None, description="why it was dropped")


class ReportResults(BaseModel):
    """What happened to each reported prediction."""

    model_config = _example(
        kept=[{"prediction_id": _PREDICTION, "novelty_id": _SHA, "outcome": "new", "reason": None}], missing=[]
    )

    kept: list[ReportResult]
    missing: list[str] = Field(description="predictions that this server no longer has, or that another server made")
