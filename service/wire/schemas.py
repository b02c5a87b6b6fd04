"""What the server says, as types: the OpenAPI page, the routes and the Python client share them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from models.inference.answer import Answer
from tasks.queue.task import Task, TaskProgress, TaskState, TaskSummary

_KNOWN: dict[str, Any] = {
    "id": "0193f1c2a4b7c0ffee120001",
    "label": "apple",
    "novel": False,
    "score": -3.1,
    "calibrated_score": 0.62,
    "p_novel": 0.08,
    "task": 0,
    "nearest": [{"label": "apple", "share": 0.93}, {"label": "pear", "share": 0.05}],
    "version": 7,
}
_NOVEL: dict[str, Any] = {
    **_KNOWN,
    "id": "0193f1c2a4b7c0ffee120002",
    "label": None,
    "novel": True,
    "score": -19.8,
    "calibrated_score": 0.01,
    "p_novel": 0.97,
}
_FAILED: dict[str, Any] = {
    "error": {"code": "broken_image", "detail": "the image cannot be decoded, it is damaged or cut short"}
}


class Nearest(BaseModel):
    """A known class that the image looks like."""

    label: str
    share: float = Field(description="its share of all classes' scores, 0 to 1")


class Prediction(BaseModel):
    """The answer to one image."""

    id: str = Field(description="names this answer, e.g. to correct it later")
    label: str | None = Field(description="the class, or null when the image is novel")
    novel: bool = Field(description="true: this is none of the classes learned so far")
    score: float | None = Field(description="log of the best class's score; null while nothing is learned")
    calibrated_score: float = Field(description="its quantile among known images, 0 to 1; comparable over versions")
    p_novel: float = Field(description="probability of no learned class, by another measure: decide by `novel`")
    task: int | None = Field(description="the task that the best class was learned in, from 0")
    nearest: list[Nearest] = Field(description="what it looks like, best first, also when novel")
    version: int = Field(description="the version that answered; 0 while nothing is learned")

    @classmethod
    def of(cls, answer: Answer, id: str, version: int) -> Prediction:
        nearest = [Nearest.model_construct(label=name, share=share) for name, share in answer.nearest]
        return cls.model_construct(
            id=id,
            label=answer.label,
            novel=answer.novel,
            score=answer.score,
            calibrated_score=answer.calibrated_score,
            p_novel=answer.p_novel,
            task=answer.task,
            nearest=nearest,
            version=version,
        )


class ImageProblem(BaseModel):
    """Why one image of several has no answer."""

    code: str = Field(description="the code that the image alone would have failed with")
    detail: str


class Failure(BaseModel):
    """Stands in the place of an image that could not be read; the others have their answers."""

    error: ImageProblem


class Predictions(BaseModel):
    """One entry for each image, in the order in which they were sent."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"predictions": [_KNOWN, _NOVEL, _FAILED]}]})

    predictions: list[Prediction | Failure]


class Base64Images(BaseModel):
    """Images as base64 text, plain or as `data:` URLs."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"images": ["/9j/4AAQSkZJRg..."]}]})

    images: list[str]


class VersionSummary(BaseModel):
    """One version: what it learned and how well it did on held-out images."""

    version: int
    parent: int | None = None
    task_id: str | None = None
    created: datetime | None = None
    state: str = Field(description="serving, available, or damaged")
    reason: str | None = Field(None, description="why it is damaged")
    learned: dict[str, int] = Field(default_factory=dict, description="images a class that its task brought")
    added: list[str] = Field(default_factory=list, description="classes that its parent did not know")
    tasks: list[list[str]] = Field(default_factory=list, description="all classes, by task")
    accuracy: float | None = None
    auc: float | None = None
    threshold: float | None = None
    capacity: float | None = Field(None, description="share of the fullest adapter that is taken")


class PromotionEntry(BaseModel):
    """Who became current when, by whom and why."""

    time: datetime
    version: int
    previous: int | None
    by: str
    reason: str


class LoadProblem(BaseModel):
    """The current version cannot be loaded; the one before it answers."""

    version: int | None
    code: str
    reason: str
    attempts: int
    since: datetime
    next_try: datetime


class Versions(BaseModel):
    """All versions of the data folder, and which one answers."""

    serving: int = Field(description="the version that answers here; 0 while nothing is learned")
    since: datetime = Field(description="since when")
    current: int | None = Field(description="the version that should answer, as the data folder says")
    problem: LoadProblem | None = Field(None, description="why the current one does not answer")
    versions: list[VersionSummary]
    history: list[PromotionEntry]


class Health(BaseModel):
    """Alive, or ready."""

    model_config = ConfigDict(extra="allow")

    status: str


class TaskAnswer(BaseModel):
    """One labelled batch on its way to a version."""

    id: str
    state: TaskState
    created: datetime
    updated: datetime
    submitted_by: str
    counts: dict[str, int] = Field(description="images a class")
    attempts: int = Field(description="how often a trainer has taken it")
    cancel_requested: bool = False
    progress: TaskProgress | None = Field(None, description="how far the learning is")
    version: int | None = Field(None, description="the version that it became")
    reason: str | None = Field(None, description="why it was rejected, failed, or is tried again")
    result: dict[str, Any] | None = Field(None, description="what the gate found: accuracy and AUC, task by task")
    fresh: bool = Field(True, description="false: it had been handed in before, and this is that task")

    @classmethod
    def of(cls, task: Task | TaskSummary, fresh: bool = True) -> TaskAnswer:
        shared = {name: getattr(task, name) for name in cls.model_fields if name != "fresh"}
        return cls(**shared, fresh=fresh)


class TaskPage(BaseModel):
    """Some tasks, newest first."""

    tasks: list[TaskAnswer]
    next: str | None = Field(None, description="give it as `before` for the next page")
    counts: dict[str, int] = Field(description="tasks that are kept, by state")


class ClassEntry(BaseModel):
    """A learned class."""

    name: str
    task: int = Field(description="the task that it was learned in, from 0")
    state: Literal["active", "merged", "retired"]
    merged_into: str | None = None


class Classes(BaseModel):
    """All classes of the current version, in the order in which they were learned."""

    version: int
    classes: list[ClassEntry]


class ClassEdit(BaseModel):
    """Exactly one of the three."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"rename": "Conference pear"}]})

    rename: str | None = Field(None, min_length=1, max_length=200, description="the new name")
    merge_into: str | None = Field(None, min_length=1, max_length=200, description="the class that it really is")
    retired: bool | None = Field(None, description="true: not answered any more; false: restore, also after a merge")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in (self.rename, self.merge_into, self.retired)) != 1:
            raise ValueError("give exactly one of rename, merge_into, retired")
        return self
