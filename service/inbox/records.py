"""The nouns of the novelty inbox: what comes in, what is kept of it, and how much may be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from service.wire.novelties import NoveltyState, Outcome

STATES: tuple[NoveltyState, ...] = get_args(NoveltyState)

Reason = Literal["rate", "too_large", "unreadable"]


@dataclass(frozen=True)
class InboxLimits:
    """How much the inbox holds, how fast it fills, and how alike two pictures must be to count as one."""

    max_count: int = 5000
    max_bytes: int = 2**30  # of the images; what is known about them takes some 4 kB each on top
    max_age_seconds: float = 30 * 24 * 3600.0  # since it was last seen
    rate: float = 20.0  # new ones a second,
    burst: int = 200  # and this many at once
    fold_bits: int = 6  # perceptual hashes that differ in at most so many bits
    fold_cosine: float = 0.92  # and embeddings that are at least so close

    def __post_init__(self) -> None:
        if min(self.max_count, self.max_bytes, self.burst) < 1:
            raise ValueError(f"max_count, max_bytes and burst must be at least 1: {self}")
        if not (self.max_age_seconds > 0 and self.rate > 0):
            raise ValueError(f"max_age_seconds and rate must be above 0: {self}")
        if not (0 <= self.fold_bits <= 64 and -1 <= self.fold_cosine <= 1):
            raise ValueError(f"fold_bits must be in 0..64 and fold_cosine in -1..1: {self}")


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One image that was answered, with the answer: `novel`, unless people say that it was wrong."""

    data: bytes = field(repr=False)
    prediction_id: str
    version: int
    score: float | None
    calibrated_score: float
    p_novel: float
    nearest: Sequence[tuple[str, float]]
    client: str
    embedding: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    sha256: str | None = None  # of `data`; worked out by the inbox when it is not at hand
    label: str | None = None  # the class that was answered, None: novel
    note: str | None = None  # what the person says who asked for it


@dataclass(frozen=True)
class Kept:
    """What became of a sighting: a new novelty, one more of a novelty that is there, or nothing and why."""

    outcome: Outcome
    id: str | None = None  # the novelty that it is, or was folded into
    reason: Reason | None = None  # when dropped


@dataclass(frozen=True)
class Novelty:
    """One picture of the inbox. Its answer is that of the newest sighting, its picture that of the first."""

    id: str  # the sha256 of its bytes
    first_seen: float
    last_seen: float
    count: int  # sightings, with those folded into it
    state: NoveltyState
    version: int
    score: float | None
    calibrated_score: float
    p_novel: float
    nearest: list[tuple[str, float]]
    prediction_id: str
    client: str
    bytes: int
    width: int  # of the picture as sent, upright
    height: int
    embedding: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)  # of length 1
    label: str | None = None  # the class that was answered, None: novel
    note: str | None = None  # of the person who asked for it
    group: str | None = None  # of those that look like it; where groups are known


@dataclass(frozen=True)
class Page:
    """Some novelties, last seen first; `next_cursor` asks for those after them, None when these were the last."""

    items: tuple[Novelty, ...]
    next_cursor: int | None


@dataclass(frozen=True)
class Only:
    """Which novelties a list shows: all, but for what is said here."""

    group: str | None = None
    version: int | None = None  # that gave the newest answer
    client: str | None = None  # who sent it last
    since: float | None = None  # last seen at this moment or later


@dataclass(frozen=True)
class Group:
    """Novelties of one state that look alike."""

    id: str  # of the one that founded it
    size: int
    newest_seen: float
    ids: tuple[str, ...]  # last seen first, at most 200
    samples: tuple[Novelty, ...]  # the first 8 of them


@dataclass(frozen=True)
class GroupPage:
    """Some groups; `next_cursor` asks for those after them, None when these were the last."""

    items: tuple[Group, ...]
    next_cursor: str | None


@dataclass(frozen=True)
class Moved:
    """What became of ids whose state was to change; those in neither list were in another state."""

    moved: tuple[str, ...]
    missing: tuple[str, ...]
