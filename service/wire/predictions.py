"""`POST /predict` and `POST /explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_KNOWN: dict[str, Any] = {
    "id": "0193f1c2a4b7c0ffee120001",
    "label": "apple",
    "novel": False,
    "certainty": "sure",
    "score": -3.1,
    "calibrated_score": 0.62,
    "p_novel": 0.08,
    "task": 0,
    "nearest": [{"label": "apple", "share": 0.87}, {"label": "pear", "share": 0.04}],
    "version": 7,
}
_NOVEL: dict[str, Any] = {
    **_KNOWN,
    "id": "0193f1c2a4b7c0ffee120002",
    "label": None,
    "novel": True,
    "certainty": "novel",
    "score": -19.8,
    "calibrated_score": 0.01,
    "p_novel": 0.97,
    "nearest": [{"label": "apple", "share": 0.02}, {"label": "pear", "share": 0.01}],
}
_FAILED: dict[str, Any] = {
    "error": {"code": "broken_image", "detail": "the image cannot be decoded, it is damaged or cut short"}
}

Certainty = Annotated[
    Literal["sure", "unsure", "novel"],
    Field(description="sure: the label's share is at least 0.7; unsure: it is smaller; novel: there is no label"),
]

RUNNER_UP_SHARE = 0.05  # the least share of a second class that is worth naming


def in_words(certainty: str, label: str | None, nearest: Sequence[tuple[str, float]], p_novel: float) -> str:
    """An answer as people read it.

    sure: apple (93 %)
    unsure: looks like pear (54 %), apple (31 %)
    unsure: looks like pear (14 %), or never seen; this is the likelier one, but not enough to call the image novel
    never seen; nearest: pear (12 %)
    """
    shares = dict(nearest)
    if label is None:
        return "; nearest: ".join(["never seen", *(_with_share(*one) for one in nearest[:1])])
    share = shares.pop(label, 0.0)
    best = _with_share(label, share)
    if certainty == "sure":
        return f"sure: {best}"
    if p_novel > share:
        return f"unsure: looks like {best}, or never seen"
    others = [_with_share(*one) for one in shares.items() if one[1] >= RUNNER_UP_SHARE]
    return ", ".join([f"unsure: looks like {best}", *others[:1]])


def _with_share(label: str, share: float) -> str:
    return f"{label} (< 1 %)" if 0 < share < 0.01 else f"{label} ({100 * share:.0f} %)"


class Nearest(BaseModel):
    """A known class that the image resembles."""

    label: str
    share: float = Field(
        description="probability of this class; all shares sum to 1 - p_novel, at most 0.5 for a "
        "novel image and at least 0.5 otherwise"
    )


class Prediction(BaseModel):
    """The answer to one image."""

    id: str = Field(description="identifies this answer, for example to correct it later")
    label: str | None = Field(description="the class, or null when the image is novel")
    novel: bool = Field(description="true: the image belongs to none of the learned classes")
    certainty: Certainty
    score: float | None = Field(description="the novelty score, higher for known images; null while nothing is learned")
    calibrated_score: float = Field(description="its quantile among known images, 0 to 1; comparable across versions")
    p_novel: float = Field(
        description="probability of no learned class where half of the images are novel; falls in `score`. The image "
        "is novel if this is above the version's `novel_above`, or if its best class is retired"
    )
    task: int | None = Field(description="the task that the best class was learned in, from 0")
    nearest: list[Nearest] = Field(description="the most similar classes, best first, also when novel")
    version: int = Field(description="the version that answered; 0 while nothing is learned")

    def in_words(self) -> str:
        """For people, for example "sure: apple (93 %)"; see `in_words` of this module."""
        return in_words(self.certainty, self.label, [(one.label, one.share) for one in self.nearest], self.p_novel)


class ImageProblem(BaseModel):
    """Why one of several images has no answer."""

    code: str = Field(description="the code that a request with this image only would have failed with")
    detail: str


class Failure(BaseModel):
    """Takes the place of the prediction of an image that could not be read."""

    error: ImageProblem


class Predictions(BaseModel):
    """One entry per image, in the order in which the images were sent."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"predictions": [_KNOWN, _NOVEL, _FAILED]}]})

    predictions: list[Prediction | Failure]


class Base64Images(BaseModel):
    """Images as base64 text, plain or as `data:` URLs."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"images": ["/9j/4AAQSkZJRg..."]}]})

    images: list[str]


class ClassEvidence(BaseModel):
    """The evidence for one class."""

    name: str
    label: str | None = Field(description="the label it is answered as: another class after a merge, null if retired")
    probability: float = Field(
        description="p(class | image, task), calibrated, with `ood` in the denominator; if the network did not run, "
        "that of the rule's scores among the classes of the task"
    )
    distance: float = Field(description="Mahalanobis distance in the task's own features, or else in the frozen ones")
    frozen_distance: float = Field(description="Mahalanobis distance in the frozen backbone's features")
    frozen_cosine: float = Field(description="cosine to the class mean in the whitened frozen features, -1 to 1")
    output_cosine: float = Field(description="the same cosine, of the backbone's output without its earlier stages")
    ridge: float = Field(description="ridge regression on random features of the frozen feature, about 1 for the class")
    refined_cosine: float | None = Field(
        None, description="the same cosine in the refined features; null if the version does not weigh them"
    )
    score: float = Field(description="the rule's log-score; the class with the largest one is the answer's")


class TaskEvidence(BaseModel):
    """The evidence of one task's network."""

    task: int
    ran: bool = Field(True, description="whether its network ran; if not, its numbers only stand in for it")
    p_ood: float = Field(description="probability of its head's `ood` output: none of its classes")
    coefficient: float = Field(description="s(x), the inverse of its smallest distance")
    classes: list[ClassEvidence]


class Explanation(BaseModel):
    """An answer and the evidence for it."""

    version: int = Field(description="the version that answered; 0 while nothing is learned")
    label: str | None
    novel: bool
    certainty: Certainty
    score: float | None = Field(description="the novelty score, higher for known images; null while nothing is learned")
    threshold: float | None = Field(description="a novelty score below it is novel; null while nothing is learned")
    calibrated_score: float
    calibrated_threshold: float | None = Field(description="the threshold as a quantile of known images")
    p_novel: float
    novel_above: float | None = Field(description="the threshold as a probability: a larger p_novel is novel")
    rule: str | None
    weights: dict[str, float] = Field(description="the weights of the rule, by the name of the evidence")
    tasks: list[TaskEvidence]
