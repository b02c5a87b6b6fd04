"""A task as both programs see it: what is to be learned, how far that is, and what became of it."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal, Self, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeInt, field_validator

from models.versions.manifest import Sha256, TaskId
from tasks.batch.check import LabelledBatch

TaskState = Literal["queued", "learning", "evaluating", "published", "rejected", "failed", "cancelled"]
STATES: tuple[TaskState, ...] = get_args(TaskState)
WORKING: frozenset[TaskState] = frozenset({"learning", "evaluating"})  # in somebody's hands
ENDED: frozenset[TaskState] = frozenset({"published", "rejected", "failed", "cancelled"})

CURVE = 200  # points of a loss curve: as many as a screen shows, whatever the number of epochs


class TaskProgress(BaseModel):
    """How far a task is; like the trainer's events, with the losses so far for a curve.

    A loss that is no number (training diverged) becomes None, as JSON knows no NaN; a long curve is thinned out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: str
    epoch: NonNegativeInt = 0
    epochs: NonNegativeInt = 0
    loss: float | None = None
    progress: float = Field(default=0.0, ge=0.0, le=1.0)  # of the whole task
    seconds_left: float | None = None
    losses: tuple[float, ...] = ()

    @field_validator("loss", "seconds_left")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    @field_validator("losses")
    @classmethod
    def _thinned(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        return thinned(value for value in values if math.isfinite(value))


class _TaskBase(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    id: TaskId
    state: TaskState = "queued"
    created: AwareDatetime
    updated: AwareDatetime
    submitted_by: str
    batch_sha256: Sha256
    duplicates: NonNegativeInt = 0
    attempts: NonNegativeInt = 0  # how often it was handed out; a graceful stop does not count
    cancel_requested: bool = False  # somebody learns it now and will stop soon
    progress: TaskProgress | None = None
    version: int | None = None
    reason: str | None = None  # why it was rejected, failed or cancelled; while it waits again, why the last try failed
    result: dict[str, Any] | None = None  # metrics of the gate

    @property
    def ended(self) -> bool:
        return self.state in ENDED


class TaskSummary(_TaskBase):
    """A task in a list: images are counted and not named, because twenty thousand hashes a line help nobody."""

    counts: dict[str, int]  # images a class


class Task(_TaskBase):
    """One task; its id is the batch's, so that the same batch is the same task."""

    classes: dict[str, list[Sha256]]  # class -> its images in the image store

    @property
    def counts(self) -> dict[str, int]:
        """Images a class."""
        return {name: len(images) for name, images in self.classes.items()}

    @classmethod
    def of(cls, batch: LabelledBatch, submitted_by: str, now: datetime | None = None) -> Self:
        """The task of a checked batch, whose images are in the image store by now."""
        now = now or datetime.now(UTC)
        return cls(
            id=batch.task_id,
            created=now,
            updated=now,
            submitted_by=submitted_by,
            classes=batch.keys,
            batch_sha256=batch.sha256,
            duplicates=batch.duplicates,
        )


def thinned(values: Iterable[float], longest: int = CURVE) -> tuple[float, ...]:
    """At most `longest` of the values, evenly spread, the first and the last among them."""
    points = tuple(values)
    if len(points) <= longest:
        return points
    step = (len(points) - 1) / (longest - 1)
    return tuple(points[round(i * step)] for i in range(longest))
