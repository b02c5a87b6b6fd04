"""What would improve a version; part of a task's result and of `GET /versions/{version}`.

The types repeat those of `trainer.learning.advice`, which needs more packages than the client has; a test compares
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field


class ConfusedPair(BaseModel):
    """Two classes whose images are answered as the other class."""

    classes: tuple[str, str]
    images: int = Field(description="left-out images that are answered as the other class")
    share: float = Field(description="of the class's left-out images, the mean of both classes")


class WrongLabel(BaseModel):
    """An image whose label looks wrong."""

    image: str = Field(description="sha256 of the image")
    label: str
    looks_like: str
    share: float = Field(description="of `looks_like`, 0 to 1")


class WeakClass(BaseModel):
    """A class that needs more images."""

    name: str
    images: int = Field(description="learned so far")
    error: float = Field(description="estimated error rate, 0 to 1")
    more: int = Field(description="images to add")
    scenes: int | None = Field(None, description="if its images are of few scenes, how many: add images of others")


class Advice(BaseModel):
    """What would help; each list starts with the most important entry."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "confused": [{"classes": ["apple", "pear"], "images": 4, "share": 0.2}],
                    "wrong_labels": [{"image": "9f86d081…", "label": "plum", "looks_like": "pear", "share": 0.97}],
                    "weak": [{"name": "pear", "images": 4, "error": 0.21, "more": 10, "scenes": None}],
                }
            ]
        }
    )

    confused: list[ConfusedPair] = Field([], description="at most 5")
    wrong_labels: list[WrongLabel] = Field([], description="at most 10")
    weak: list[WeakClass] = Field([], description="at most 3")

    def in_words(self, names: Mapping[str, str] | None = None) -> list[str]:
        """One sentence per entry; `names` are those of images, by sha256."""
        weak = [
            f"{one.more} more images of {one.name}{', taken elsewhere,' if one.scenes else ''} would "
            f"help{'' if rank else ' most'} (it has {one.images}{_of_scenes(one.scenes)})"
            for rank, one in enumerate(self.weak)
        ]
        wrong = [
            f"{(names or {}).get(one.image, f'image {one.image[:12]}')} is labelled {one.label}, but looks like "
            f"{one.looks_like} ({100 * one.share:.0f} %): check its label"
            for one in self.wrong_labels
        ]
        confused = [
            f"{one.classes[0]} and {one.classes[1]} are confused: {one.images} images of one are answered as the other"
            for one in self.confused
        ]
        return wrong + confused + weak


def _of_scenes(scenes: int | None) -> str:
    return "" if scenes is None else f", of {scenes} scene{'' if scenes == 1 else 's'}"
