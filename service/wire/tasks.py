"""`/tasks`: labelled batches and their way to a version.

`TaskState` and `TaskProgress` repeat those of `tasks.queue.task`, which the client must not import; a test compares
them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TaskState = Literal["queued", "learning", "evaluating", "published", "rejected", "failed", "cancelled"]


class TaskProgress(BaseModel):
    """Progress of the training."""

    model_config = ConfigDict(from_attributes=True)

    phase: str = Field(description="the last one, if the task has ended")
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    progress: float = Field(0.0, description="of the whole task, 0 to 1; 1 if it was published or rejected")
    seconds_left: float | None = Field(None, description="null if it cannot be estimated, or the task has ended")
    losses: tuple[float, ...] = Field((), description="the losses so far, at most 200 points")


class TaskAnswer(BaseModel):
    """One task."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    state: TaskState
    created: datetime
    updated: datetime
    submitted_by: str
    counts: dict[str, int] = Field(description="images per class")
    attempts: int = Field(description="how often a worker has claimed it")
    cancel_requested: bool = False
    progress: TaskProgress | None = None
    provisional: int | None = Field(
        None, description="the first version that answers with its classes, in closed form, before it is learned"
    )
    version: int | None = Field(None, description="the version that it became")
    reason: str | None = Field(
        None, description="why it was rejected, failed, is tried again, or stays provisional although published"
    )
    result: dict[str, Any] | None = Field(
        None,
        description="accuracy and AUC of each task, the number of classes, estimates for fresh images, and the advice",
    )
    warnings: list[str] = Field(
        [], description="of its submission: classes with one image, and images that move from another class"
    )
    fresh: bool = Field(True, description="false: the same batch was submitted before, and this is its task")


class Refinement(BaseModel):
    """Whether trainers learn tasks."""

    paused: bool = Field(description="true: submitted classes answer provisionally and are not learned further")


class RefinementChange(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"paused": True}]})

    paused: bool


class TaskPage(BaseModel):
    """Some tasks, newest first."""

    tasks: list[TaskAnswer]
    next: str | None = Field(None, description="pass it as `before` for the next page")
    counts: dict[str, int] = Field(description="stored tasks, by state")
    paused: bool = Field(False, description="learning is paused: see PUT /refinement")


class Labels(BaseModel):
    """A batch of images that the server has: per class, ids of novelties or predictions, or the sha256 of images."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"classes": {"kiwi": ["0193f1c2a4b7c0ffee120002", "9f2c...64 digits"]}}]},
    )

    classes: dict[str, Annotated[list[str], Field(max_length=20_000)]]
