"""The types of the novelty inbox."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from service.wire.novelties import AddOutcome, NoveltyState

STATES: tuple[NoveltyState, ...] = get_args(NoveltyState)

# "queue": the writer's queue is full or closed; "error": the disk or the database failed; "no_inbox": this server has
# none, because another one has it open or it cannot be opened; "erased": the image was erased meanwhile.
DropReason = Literal["rate", "too_large", "unreadable", "queue", "error", "no_inbox", "erased"]


@dataclass(frozen=True)
class InboxLimits:
    """Capacity and fill rate of the inbox, and the similarity from which sightings are folded."""

    max_count: int = 5000
    max_bytes: int = 2**30  # of the images; each row takes about 4 kB more
    max_age_seconds: float = 30 * 24 * 3600.0  # since last seen, while the inbox was open
    max_kept_seconds: float = math.inf  # since first seen, by the wall clock: the time that is promised to people
    rate: float = 20.0  # new novelties per second
    burst: int = 200  # new novelties at once
    fold_bits: int = 6  # fold when the perceptual hashes differ in at most this many bits
    fold_cosine: float = 0.92  # and the cosine of the embeddings is at least this

    def __post_init__(self) -> None:
        if min(self.max_count, self.max_bytes, self.burst) < 1:
            raise ValueError(f"max_count, max_bytes and burst must be at least 1: {self}")
        if not (min(self.max_age_seconds, self.max_kept_seconds) > 0 and self.rate > 0):
            raise ValueError(f"max_age_seconds, max_kept_seconds and rate must be above 0: {self}")
        if not (0 <= self.fold_bits <= 64 and -1 <= self.fold_cosine <= 1):
            raise ValueError(f"fold_bits must be in 0..64 and fold_cosine in -1..1: {self}")


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One answered image. The answer is novel, unless a person reported the image."""

    data: bytes = field(repr=False)
    prediction_id: str
    version: int
    score: float | None
    calibrated_score: float
    p_novel: float
    nearest: Sequence[tuple[str, float]]
    client: str
    embedding: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    sha256: str | None = None  # of `data`; None: the inbox computes it
    label: str | None = None  # the answered class, None: novel
    note: str | None = None  # of the person that reported the image

    @classmethod
    def without_answer(cls, data: bytes, sha256: str | None = None) -> Sighting:
        """Of an image whose row is lost: the answer is unknown."""
        return cls(
            data=data,
            prediction_id="",
            version=0,
            score=None,
            calibrated_score=0.0,
            p_novel=1.0,
            nearest=(),
            client="",
            sha256=sha256,
        )


@dataclass(frozen=True)
class AddResult:
    """What happened to a sighting: stored as a new novelty, folded into an existing one, or dropped."""

    outcome: AddOutcome
    id: str | None = None  # of the novelty; None when dropped
    reason: DropReason | None = None  # when dropped


@dataclass(frozen=True)
class Novelty:
    """One novelty: the image of its first sighting, the answer of its newest sighting."""

    id: str  # the sha256 of its bytes
    first_seen: float
    last_seen: float
    count: int  # sightings, including folded ones
    state: NoveltyState
    version: int
    score: float | None
    calibrated_score: float
    p_novel: float
    nearest: list[tuple[str, float]]
    prediction_id: str
    client: str
    bytes: int
    width: int  # of the image as sent, upright
    height: int
    label: str | None = None  # the answered class, None: novel
    note: str | None = None  # of the person that reported the image
    group: str | None = None  # set by the inbox; the table does not have it


class Now(NamedTuple):
    """The time of a sighting."""

    wall: float  # seconds since the epoch, for people
    ran: float  # seconds that the inbox was open, for its age


class IndexEntry(NamedTuple):
    """The part of a row that the in-memory index needs."""

    id: str
    state: NoveltyState
    bytes: int
    hash: int
    embedding: NDArray[np.float32] | None  # of length 1


class ListedNovelty(NamedTuple):
    """The part of a row that orders groups."""

    id: str
    seen: int  # number of its newest sighting
    last_seen: float


@dataclass(frozen=True)
class NoveltyFilter:
    """Which novelties to list; None does not filter."""

    group: str | None = None
    version: int | None = None  # of the newest answer
    client: str | None = None  # of the newest sighting
    since: float | None = None  # last seen at this time or later


@dataclass(frozen=True)
class NoveltyPage:
    """Some novelties, last seen first, and the cursor of the next page (None: this is the last)."""

    items: tuple[Novelty, ...]
    next_cursor: int | None


@dataclass(frozen=True)
class Group:
    """Similar novelties of one state."""

    id: str  # of the group's first novelty
    size: int
    newest_seen: float
    ids: tuple[str, ...]  # last seen first, at most 200
    samples: tuple[Novelty, ...]  # the first 8 of them


@dataclass(frozen=True)
class GroupPage:
    """Some groups, and the cursor of the next page (None: this is the last)."""

    items: tuple[Group, ...]
    next_cursor: str | None


@dataclass(frozen=True)
class StateChange:
    """The novelties that changed state; ids in neither list were not in the expected state."""

    changed: tuple[str, ...]
    missing: tuple[str, ...]  # not in the inbox
