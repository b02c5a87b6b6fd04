"""A task as server and worker see it, and its record in Redis: a hash of texts, so that Lua can change one field."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Self, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationInfo, field_validator
from pydantic_core import to_json

from models.versions.manifest import Sha256, TaskId
from tasks.batch import LabelledBatch

TaskState = Literal["queued", "learning", "evaluating", "published", "rejected", "failed", "cancelled"]
STATES: tuple[TaskState, ...] = get_args(TaskState)
ENDED: frozenset[TaskState] = frozenset({"published", "rejected", "failed", "cancelled"})

MAX_CURVE_POINTS = 200  # of a loss curve, whatever the number of epochs
MAX_TEXT = 4000  # characters of a reason or a name
_JSON_FIELDS = frozenset({"progress", "result", "classes", "counts", "warnings"})


class TaskProgress(BaseModel):
    """The progress of a task, with the losses so far.

    A loss that is not finite becomes None, because JSON has no NaN. A long curve is downsampled.
    """

    # During a rolling upgrade a worker of the next release may add fields.
    model_config = ConfigDict(frozen=True, extra="ignore")

    phase: str
    epoch: NonNegativeInt = 0
    epochs: NonNegativeInt = 0
    loss: float | None = None
    progress: float = Field(default=0.0, ge=0.0, le=1.0)  # share of the whole task
    seconds_left: float | None = None
    losses: tuple[float, ...] = ()

    @field_validator("loss", "seconds_left")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    @field_validator("losses")
    @classmethod
    def _downsampled(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        points = tuple(value for value in values if math.isfinite(value))
        if len(points) <= MAX_CURVE_POINTS:
            return points
        step = (len(points) - 1) / (MAX_CURVE_POINTS - 1)  # keeps the first and the last point
        return tuple(points[round(i * step)] for i in range(MAX_CURVE_POINTS))


class _TaskBase(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    id: TaskId
    state: TaskState = "queued"
    created: AwareDatetime
    updated: AwareDatetime
    submitted_by: str
    batch_sha256: Sha256
    duplicates: NonNegativeInt = 0
    warnings: tuple[str, ...] = ()  # of its last submission
    attempts: NonNegativeInt = 0  # leases so far; not those that were handed back or advanced the checkpoint
    cancel_requested: bool = False  # a worker holds the task and will end it soon
    progress: TaskProgress | None = None  # as last reported; see `_without_remaining_work`
    provisional: int | None = None  # the version that answers with its classes before it is learned
    version: int | None = None
    reason: str | None = None  # of the rejection, failure or cancellation; of a queued task: of its last failed attempt
    result: dict[str, Any] | None = None  # metrics of the gate

    @field_validator("progress")
    @classmethod
    def _without_remaining_work(cls, value: TaskProgress | None, info: ValidationInfo) -> TaskProgress | None:
        """Workers report their progress at intervals, so the last report of an ended task precedes its end."""
        state = info.data.get("state")
        if value is None or state not in ENDED:
            return value
        learned = {"progress": 1.0} if state in ("published", "rejected") else {}
        return value.model_copy(update={"seconds_left": None, **learned})

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> Self:
        """Read a record; ignores the fields that only the queue uses."""
        fields = {name: record[name] for name in cls.model_fields if name in record}
        return cls.model_validate({n: json.loads(text) if n in _JSON_FIELDS else text for n, text in fields.items()})


class TaskSummary(_TaskBase):
    """A task in a list: counts the images instead of naming them, because a batch may have 20,000."""

    counts: dict[str, int]  # images per class

    @classmethod
    def from_row(cls, row: Sequence[str | None]) -> Self:
        """Read the values of a record's fields, in the order of `model_fields`."""
        fields = zip(cls.model_fields, row, strict=True)
        return cls.from_record({name: text for name, text in fields if text is not None})


class Task(_TaskBase):
    """A task. Its id is the id of its batch: the same batch is the same task."""

    classes: dict[str, list[Sha256]]  # class -> keys of its images in the image store
    submission: str = ""  # changes whenever the task is queued again
    submitted_at: int | None = None  # the version that was current, 0 before the first: what the labels refer to

    @property
    def counts(self) -> dict[str, int]:
        """Images per class."""
        return {name: len(images) for name, images in self.classes.items()}

    @property
    def images(self) -> set[str]:
        """The keys of all its images."""
        return {key for keys in self.classes.values() for key in keys}

    @classmethod
    def of(
        cls, batch: LabelledBatch, submitted_by: str, submitted_at: int | None = None, warnings: Sequence[str] = ()
    ) -> Self:
        """Make the task of a checked batch. Its images must be in the image store."""
        now = datetime.now(UTC)
        return cls(
            id=batch.task_id,
            created=now,
            updated=now,
            submitted_by=submitted_by,
            submitted_at=submitted_at,
            classes=batch.keys,
            batch_sha256=batch.sha256,
            duplicates=batch.duplicates,
            warnings=tuple(warnings),
        )

    @classmethod
    def from_reply(cls, flat: Sequence[str]) -> Self:
        """Read a record from a Lua reply: fields and values in turn."""
        return cls.from_record(dict(zip(flat[::2], flat[1::2], strict=True)))

    def submission_record(self) -> dict[str, str]:
        """Return the fields that a submission writes. The queue writes the others."""
        submitted_at = {} if self.submitted_at is None else {"submitted_at": str(self.submitted_at)}
        return submitted_at | {
            "id": self.id,
            "created": self.created.isoformat(),
            "submitted_by": clean_text(self.submitted_by),
            "batch_sha256": self.batch_sha256,
            "duplicates": str(self.duplicates),
            "warnings": dump_json(self.warnings),
            "classes": dump_json(self.classes),
            "counts": dump_json(self.counts),
        }


def dump_json(value: Any) -> str:
    """Write metrics as JSON: NaN as null, numpy values as lists or numbers, anything else as its text."""
    return to_json(value, inf_nan_mode="null", fallback=_jsonable).decode()


def _jsonable(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def clean_text(value: str) -> str:
    """Return text that Redis can store: valid UTF-8, at most `MAX_TEXT` characters."""
    clean = value.encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_TEXT else clean[: MAX_TEXT - 1] + "…"
