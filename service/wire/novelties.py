"""What labellers hear of the inbox, and operators of stored images, as types."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from service.inbox import Group, GroupPage, Kept, Moved, Novelty, Page, State
from service.wire.schemas import Nearest
from tasks.images.retention import Expired, Removed, Uses

LARGEST_LIST = 5000  # ids of one request

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
    "nearest": [{"label": "apple", "share": 0.61}, {"label": "pear", "share": 0.3}],
    "prediction_id": _PREDICTION,
    "client": "robot-3",
    "bytes": 48213,
    "width": 640,
    "height": 480,
    "note": "a quince, not an apple",
}


def _example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class NoveltyAnswer(BaseModel):
    """One picture of the inbox. Its answer is that of the newest sighting, its picture that of the first."""

    model_config = _example(**_NOVELTY)

    id: str = Field(description="the sha256 of its bytes")
    group: str | None = Field(description="those that look like it: GET /novelties?group=")
    state: State
    first_seen: datetime
    last_seen: datetime
    count: int = Field(description="sightings, with those nearly the same")
    label: str | None = Field(description="the class that was answered, when a person said that it is wrong")
    version: int = Field(description="the version that answered; 0 while nothing was learned")
    score: float | None
    calibrated_score: float
    p_novel: float
    nearest: list[Nearest] = Field(description="known classes that it looks like, best first")
    prediction_id: str
    client: str = Field(description="the name of the key that sent it")
    bytes: int
    width: int = Field(description="of the picture as sent, upright")
    height: int
    note: str | None = Field(description="what the person said who asked for it")

    @classmethod
    def of(cls, novelty: Novelty) -> NoveltyAnswer:
        special = {"first_seen", "last_seen", "nearest"}
        return cls.model_construct(
            first_seen=_time(novelty.first_seen),
            last_seen=_time(novelty.last_seen),
            nearest=[Nearest.model_construct(label=name, share=share) for name, share in novelty.nearest],
            **{name: getattr(novelty, name) for name in cls.model_fields if name not in special},
        )


class Novelties(BaseModel):
    """Some novelties, last seen first."""

    model_config = _example(items=[_NOVELTY], next_cursor=4711)

    items: list[NoveltyAnswer]
    next_cursor: int | None = Field(description="give it as `before` for the next page; null: these were the last")

    @classmethod
    def of(cls, page: Page) -> Novelties:
        items = [NoveltyAnswer.of(item) for item in page.items]
        return cls.model_construct(items=items, next_cursor=page.next_cursor)


class NoveltyGroup(BaseModel):
    """Novelties that look alike, to be named together."""

    id: str = Field(description="the novelty that founded it; stays while the server runs")
    size: int = Field(description="novelties in the state that was asked for")
    newest_seen: datetime
    ids: list[str] = Field(description="last seen first, at most 200; GET /novelties?group= has them all")
    samples: list[NoveltyAnswer] = Field(description="the first 8 of them")

    @classmethod
    def of(cls, group: Group) -> NoveltyGroup:
        return cls.model_construct(
            id=group.id,
            size=group.size,
            newest_seen=_time(group.newest_seen),
            ids=list(group.ids),
            samples=[NoveltyAnswer.of(sample) for sample in group.samples],
        )


class NoveltyGroups(BaseModel):
    """Some groups, in the order that was asked for."""

    model_config = _example(
        items=[
            {"id": _SHA, "size": 12, "newest_seen": "2025-01-01T12:00:07Z", "ids": [_SHA], "samples": [_NOVELTY]},
        ],
        next_cursor="12.4711",
    )

    items: list[NoveltyGroup]
    next_cursor: str | None = Field(description="give it as `before` for the next page; null: these were the last")

    @classmethod
    def of(cls, page: GroupPage) -> NoveltyGroups:
        items = [NoveltyGroup.of(group) for group in page.items]
        return cls.model_construct(items=items, next_cursor=page.next_cursor)


class NoveltyIds(BaseModel):
    """Which novelties."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"ids": [_SHA]}]})

    ids: list[NoveltyId] = Field(min_length=1, max_length=LARGEST_LIST)


class Changed(BaseModel):
    """What became of them; ids in neither list were in another state, and were left as they are."""

    model_config = _example(changed=[_SHA], missing=[])

    changed: list[str]
    missing: list[str] = Field(description="not in the inbox: deleted, evicted, or never there")

    @classmethod
    def of(cls, moved: Moved) -> Changed:
        return cls(changed=list(moved.moved), missing=list(moved.missing))


class WrongPredictions(BaseModel):
    """Answers that a person says are wrong, or of something novel."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"prediction_ids": [_PREDICTION], "note": "a quince, not an apple"}]},
    )

    prediction_ids: list[PredictionId] = Field(min_length=1, max_length=200)
    note: str | None = Field(None, max_length=500, description="for whoever labels them")


class KeptPrediction(BaseModel):
    """One prediction whose image is in the inbox now."""

    prediction_id: str
    novelty_id: str | None = Field(description="null when it was dropped")
    outcome: Literal["new", "folded", "dropped"] = Field(description="folded: these bytes were there already")
    reason: str | None = Field(None, description="why it was dropped")

    @classmethod
    def of(cls, prediction_id: str, kept: Kept) -> KeptPrediction:
        return cls(prediction_id=prediction_id, novelty_id=kept.id, outcome=kept.outcome, reason=kept.reason)


class KeptPredictions(BaseModel):
    """What became of each."""

    model_config = _example(
        kept=[{"prediction_id": _PREDICTION, "novelty_id": _SHA, "outcome": "new", "reason": None}], missing=[]
    )

    kept: list[KeptPrediction]
    missing: list[str] = Field(description="this server does not have them any more, or another one answered")


class ImageUses(BaseModel):
    """What depends on a stored image."""

    model_config = _example(
        sha256=_SHA,
        stored=True,
        bytes=48213,
        stored_at="2025-01-01T12:00:00Z",
        in_memory_of=[3, 4],
        held_out_by=[],
        in_use_now=True,
        tasks=[],
        inbox=False,
    )

    sha256: str
    stored: bool = Field(description="tasks brought it, and it is kept to be replayed to later ones")
    bytes: int | None
    stored_at: datetime | None = Field(description="when a task last brought it")
    in_memory_of: list[int] = Field(description="versions whose replay memory names it")
    held_out_by: list[int] = Field(description="versions that are judged by it")
    in_use_now: bool = Field(description="the current version is one of them")
    tasks: list[str] = Field(description="tasks that have not ended and bring it")
    inbox: bool = Field(description="it is a novelty, too")

    @classmethod
    def of(cls, uses: Uses, inbox: bool) -> ImageUses:
        return cls(
            sha256=uses.sha256,
            stored=uses.stored is not None,
            bytes=uses.stored.bytes if uses.stored else None,
            stored_at=_time(uses.stored.time) if uses.stored else None,
            in_memory_of=list(uses.memory),
            held_out_by=list(uses.held_out),
            in_use_now=uses.current,
            tasks=list(uses.tasks),
            inbox=inbox,
        )


class ExpiredImages(BaseModel):
    """What a deletion by age would remove, and what it would keep."""

    model_config = _example(older_than_days=90, images=812, bytes=41234567, kept=120, kept_bytes=6001234)

    older_than_days: float
    images: int = Field(description="would be removed")
    bytes: int
    kept: int = Field(description="as old, but named by the current version or by a task that has not ended")
    kept_bytes: int

    @classmethod
    def of(cls, older_than_days: float, expired: Expired) -> ExpiredImages:
        return cls(
            older_than_days=older_than_days,
            images=len(expired.removable),
            bytes=expired.bytes,
            kept=expired.kept,
            kept_bytes=expired.kept_bytes,
        )


class RemovedImages(BaseModel):
    """What was removed."""

    model_config = _example(images=1, bytes=48213, novelties=0)

    images: int = Field(description="that tasks brought")
    bytes: int
    novelties: int = Field(description="the same images in the inbox")

    @classmethod
    def of(cls, removed: Removed, novelties: int) -> RemovedImages:
        return cls(images=len(removed.sha256s), bytes=removed.bytes, novelties=novelties)
