"""`/images`: stored images, and their erasure."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field


class ImageUses(BaseModel):
    """Where an image is stored, and what depends on it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
                    "stored": True,
                    "features": False,
                    "bytes": 48213,
                    "stored_at": "2025-01-01T12:00:00Z",
                    "in_memory_of": [3, 4],
                    "held_out_by": [],
                    "in_use_now": True,
                    "tasks": [],
                    "inbox": False,
                }
            ]
        }
    )

    sha256: str
    stored: bool = Field(description="it is in the image store: a task submitted it, and later tasks may replay it")
    features: bool = Field(False, description="its features are stored in its place")
    bytes: int | None
    stored_at: datetime | None = Field(description="when a task last submitted it")
    in_memory_of: list[int] = Field(description="versions with the image in their replay memory")
    held_out_by: list[int] = Field(description="versions with the image among their held-out images")
    in_use_now: bool = Field(description="the current version is one of them")
    tasks: list[str] = Field(description="unfinished tasks that contain it")
    inbox: bool = Field(description="it is also a novelty")


class ExpiredImages(BaseModel):
    """What a deletion by age would remove, and what it would keep."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"older_than_days": 90, "images": 812, "bytes": 41234567, "kept": 120, "kept_bytes": 6001234}]
        }
    )

    older_than_days: float
    images: int = Field(description="would be removed")
    bytes: int
    kept: int = Field(description="as old, but in use by the current version or an unfinished task")
    kept_bytes: int


class RemovedImages(BaseModel):
    """What was removed."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "images": 1,
                    "bytes": 48213,
                    "novelties": 0,
                    "recent": 1,
                    "remains": [
                        "versions 3, 4, trained with it: weights and statistics keep its influence, also in versions "
                        "that are learned from now on, the list of samples its hash"
                    ],
                }
            ]
        }
    )

    images: int = Field(description="removed from the image store")
    bytes: int
    novelties: int = Field(description="removed from the inbox")
    recent: int = Field(default=0, description="recent predictions on it that this server had in memory")
    remains: list[str] = Field(default=[], description="what is not erased, or only later: one sentence each")
