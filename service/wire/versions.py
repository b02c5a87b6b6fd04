"""`GET /versions`, `GET /versions/{version}` and `POST /versions/{version}/activate`."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, Field


class VersionSummary(BaseModel):
    """One version in the list: what it learned, and its accuracy on held-out images."""

    version: int
    parent: int | None = None
    task_id: str | None = None
    created: datetime | None = None
    state: str = Field(description="serving, available, or damaged")
    reason: str | None = Field(None, description="why it is damaged")
    learned: dict[str, int] = Field(default_factory=dict, description="images per class in its task's batch")
    added: list[str] = Field(default_factory=list, description="classes that its parent does not have")
    tasks: list[list[str]] = Field(default_factory=list, description="all classes, by task")
    accuracy: float | None = None
    auc: float | None = None
    threshold: float | None = None
    capacity: float | None = Field(None, description="used share of the fullest adapter")


class PromotionEntry(BaseModel):
    """One change of the current version."""

    time: datetime
    version: int
    previous: int | None
    by: str
    reason: str


class LoadProblem(BaseModel):
    """Why the current version cannot be loaded; the version that was active before it keeps answering."""

    version: int | None
    code: str
    reason: str
    attempts: int
    since: datetime
    next_try: datetime


class Versions(BaseModel):
    """All versions of the data folder, and the one that is active in this server."""

    serving: int = Field(description="the active version; 0 while nothing is learned")
    since: datetime = Field(description="when it became active")
    current: int | None = Field(description="the current version of the data folder")
    problem: LoadProblem | None = Field(None, description="why the current version is not the active one")
    versions: list[VersionSummary]
    history: list[PromotionEntry]


class TaskReport(BaseModel):
    """The gate's result for one task on held-out images: before (the parent) and after (this version)."""

    task: int
    classes: list[str]
    images: int = Field(description="held-out images")
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    auc_before: float | None = None
    auc_after: float | None = None


class VersionDetail(BaseModel):
    """One version, with the scores that its threshold was fitted on."""

    version: int
    parent: int | None
    task_id: str
    created: datetime
    tasks: list[list[str]] = Field(description="all classes, by task")
    aliases: dict[str, str | None] = Field(description="merged classes, and retired ones (null)")
    rule: str
    constants: dict[str, float] = Field(description="the fitted constants of the rule")
    threshold: float | None = Field(description="a score below it is novel")
    accept: float | None = Field(None, description="the share of known images that the threshold was set to accept")
    reference: list[float] = Field(description="sorted scores of held-out known images, at most 256")
    reports: list[TaskReport] = Field(description="the gate's result per task; empty when there was no gate")
    edit: str | None = Field(None, description="the change of classes, for a version made without training")
    learned: dict[str, int] = Field(default_factory=dict, description="images per class in its task's batch")
    capacity: dict[str, float] = Field(default_factory=dict, description="used share per adapter")
    seconds: float | None = Field(None, description="duration of the training")
    backbone: str | None = None
