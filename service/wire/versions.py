"""`GET /versions`, `GET /versions/{version}` and `POST /versions/{version}/activate`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from service.wire.advice import Advice
from service.wire.keys import Keep

LEAST_CLASSES_FOR_AUC = 5  # below, classes that are left out in turn say little about images of other classes

Accuracy = Annotated[
    float | None, Field(description="estimate for fresh images, over all classes; measured on left-out images")
]
NoveltyAuc = Annotated[
    float | None,
    Field(
        description="estimate for fresh images: AUC of known against novel ones; measured on simulated novelty, which "
        f"says little with fewer than {LEAST_CLASSES_FOR_AUC} classes"
    ),
]


class VersionSummary(BaseModel):
    """One version in the list: what it learned, and how well it should answer fresh images."""

    version: int
    parent: int | None = None
    task_id: str | None = None
    created: datetime | None = None
    stage: Literal["provisional", "refined"] = Field(
        "refined", description="provisional: some of its tasks answer in closed form and are not learned yet"
    )
    pending: list[str] = Field(default_factory=list, description="the ids of these tasks")
    state: str = Field(
        description="serving, available, damaged, or discarded: its contents are removed, and it cannot be activated"
    )
    reason: str | None = Field(None, description="why it is damaged or discarded")
    learned: dict[str, int] = Field(default_factory=dict, description="images per class in its task's batch")
    added: list[str] = Field(
        default_factory=list,
        description="classes that it is the first to have learned, or to answer with before they are learned",
    )
    edit: str | None = Field(None, description="the change of classes, for a version made without training")
    tasks: list[list[str]] = Field(default_factory=list, description="all classes, by task")
    accuracy: Accuracy = None
    novelty_auc: NoveltyAuc = None
    threshold: float | None = None
    novel_above: float | None = Field(None, description="the threshold as a probability: a larger p_novel is novel")
    capacity: float | None = Field(None, description="used share of the fullest adapter")
    keep: Keep = Field("images", description="what the folder kept of taught images: its decisions were fitted on that")


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


class DiskUsage(BaseModel):
    """Bytes that the data folder holds; at most a minute old."""

    versions: int = Field(description="manifests, heads, samples and the log of promotions")
    tasks: int = Field(description="what the tasks have learned, each stored once")
    graphs: int
    images: int = Field(description="images of batches")
    features: int = Field(0, description="features in place of images")
    inbox: int


class Versions(BaseModel):
    """All versions of the data folder, and the one that is active in this server."""

    serving: int = Field(description="the active version; 0 while nothing is learned")
    since: datetime = Field(description="when it became active")
    current: int | None = Field(description="the current version of the data folder")
    problem: LoadProblem | None = Field(None, description="why the current version is not the active one")
    keep: Keep = Field("images", description="what the data folder keeps of taught images")
    versions: list[VersionSummary]
    history: list[PromotionEntry]
    disk: DiskUsage | None = Field(None, description="what the data folder holds")


class TaskReport(BaseModel):
    """The gate's result for one task on held-out images: before (the parent) and after (this version)."""

    task: int
    classes: list[str]
    images: int = Field(description="held-out images")
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    auc_before: float | None = None
    auc_after: float | None = None


class NetworkGain(BaseModel):
    """What training adds to the class decision: mean cross-entropies on held-out images, cross-validated.

    A CNN's networks count if theirs is lower; a transformer's, and a CNN's refined feature, unless it is higher by more
    than two errors.
    """

    closed_form: float = Field(description="with the frozen backbone's evidence only")
    networks: float = Field(description="with the evidence of the networks or of the refined feature")
    error: float = Field(description="the standard error of the difference")


class VersionDetail(BaseModel):
    """One version, with the scores that its threshold was fitted on."""

    version: int
    parent: int | None
    task_id: str
    created: datetime
    stage: Literal["provisional", "refined"] = Field(
        "refined", description="provisional: some of its tasks answer in closed form and are not learned yet"
    )
    pending: list[str] = Field(default_factory=list, description="the ids of these tasks")
    tasks: list[list[str]] = Field(description="all classes, by task")
    aliases: dict[str, str | None] = Field(description="merged classes, and retired ones (null)")
    accuracy: Accuracy = None
    novelty_auc: NoveltyAuc = None
    rule: str = Field(description="fitted, refined feature, paper, provisional, or closed form: training does not pay")
    networks: NetworkGain | None = Field(None, description="the comparison behind it; null if there was none")
    weights: dict[str, float] = Field(description="the weights of the rule, by the name of the evidence")
    novelty_weights: dict[str, float] = Field(
        description="the weights of the novelty score, by the name of the summary; empty for a discarded version"
    )
    threshold: float | None = Field(description="a novelty score below it is novel; null: every image is novel")
    novel_above: float = Field(description="the threshold as a probability: a larger p_novel is novel")
    accept: float | None = Field(None, description="the share of known images that the trainer was set to accept")
    flag: float | None = Field(
        None, description="the share of simulated novel images that the trainer was set to flag; it precedes `accept`"
    )
    reference: list[float] = Field(description="sorted novelty scores of left-out known images, at most 256")
    simulated: list[float] = Field(description="sorted novelty scores of simulated novel images, at most 256")
    reports: list[TaskReport] = Field(description="the gate's result per task; empty when there was no gate")
    advice: Advice | None = Field(None, description="what would help; null for a version made without training")
    edit: str | None = Field(None, description="the change of classes, for a version made without training")
    learned: dict[str, int] = Field(default_factory=dict, description="images per class in its task's batch")
    capacity: dict[str, float] = Field(default_factory=dict, description="used share per adapter")
    seconds: float | None = Field(None, description="duration of the training; null if there was none")
    backbone: str | None = None
    method: str = Field("more", description="how its tasks were learned: more, hat-csi or sup-csi")
    rotations: int = Field(1, description="rotations of an image that an answer takes, each a pass of the trunk")
    drawn: int = Field(0, description="draws from class statistics among the images that it was fitted and measured on")
    keep: Keep = Field("images", description="what the folder kept of taught images: its decisions were fitted on that")
