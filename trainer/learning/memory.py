"""The replay memory and the held-out images: which pictures a version keeps, and what for.

Memory is trained on again (as `ood` for other tasks, as itself for its own head). Held-out images never are: they
calibrate the scores and judge the next version.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tasks.batch.check import shortened
from tasks.errors import BatchError

HELD_OUT_A_CLASS = 50  # enough for a quantile; more would only cost time at each new task


@dataclass(frozen=True)
class HeldOut:
    """An image that judges. With few images a class all are trained on, and cross-fit says what each would have got.

    The two tuples, one entry a class of the image's task (and `ood`, for the logits), are what training on the image
    does to its evidence, as the folds of its own task measured it. They are empty for an image that was held out.
    """

    key: str
    label: str
    logit_shift: tuple[float, ...] = ()  # held-out logits minus trained-on logits
    distance_ratio: tuple[float, ...] = ()  # held-out distance over the trained-on one, both without it in S

    @property
    def trained_on(self) -> bool:
        return bool(self.logit_shift)


@dataclass(frozen=True)
class Samples:
    """All images that a version keeps."""

    memory: dict[str, tuple[str, ...]] = field(default_factory=dict)  # class -> image keys
    held_out: tuple[HeldOut, ...] = ()
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # every image ever learned, kept or not

    @property
    def keys(self) -> set[str]:
        return {key for keys in self.memory.values() for key in keys} | {sample.key for sample in self.held_out}

    def without_missing(self, present: Container[str]) -> Samples:
        """What is left when images were deleted. A class keeps its place in the memory, also without an image."""
        memory = {name: tuple(key for key in keys if key in present) for name, keys in self.memory.items()}
        held_out = tuple(sample for sample in self.held_out if sample.key in present)
        return replace(self, memory=memory, held_out=held_out)

    def to_json(self) -> dict[str, Any]:
        held_out = [asdict(sample) for sample in self.held_out]
        return {"memory": self.memory, "held_out": held_out, "seen": self.seen}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Samples:
        parts = ("logit_shift", "distance_ratio")
        held_out = [
            HeldOut(row["key"], row["label"], *(tuple(row[part]) for part in parts)) for row in data["held_out"]
        ]
        memory, seen = ({name: tuple(keys) for name, keys in data[part].items()} for part in ("memory", "seen"))
        return cls(memory, tuple(held_out), seen)


def unseen(
    images: Mapping[str, Sequence[str]], samples: Samples, origins: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """What a batch brings that is new: an image learned twice would count twice, and might judge what it trained."""
    label_of = {key: name for name, keys in samples.seen.items() for key in keys}
    clashes = [
        f"{(origins or {}).get(key, key)} is {name!r} here, but was learned as {label_of[key]!r}: leave it out"
        for name, keys in sorted(images.items())
        for key in keys
        if label_of.get(key, name) != name
    ]
    fresh = {name: [key for key in keys if key not in label_of] for name, keys in sorted(images.items())}
    fresh = {name: keys for name, keys in fresh.items() if keys}
    if clashes:
        raise BatchError(shortened(clashes, "images that were learned under another label: leave them out"))
    if not fresh:
        raise BatchError(["every image of this batch is learned already: add images that are not"])
    return fresh


def merged(seen: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Both together, class by class."""
    return {name: (*seen.get(name, ()), *new.get(name, ())) for name in (*seen, *(n for n in new if n not in seen))}


def remember(
    memory: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]], size: int, rng: np.random.Generator
) -> dict[str, tuple[str, ...]]:
    """Equal counts a class, within the size: old classes shrink at random, known classes mix old and new."""
    pools = {name: list(keys) for name, keys in memory.items()}
    for name, keys in new.items():
        pools.setdefault(name, []).extend(key for key in keys if key not in pools[name])
    check_size(memory, new, size)
    quota = size // max(len(pools), 1)
    # In the order of the names, in which a stored version comes back: the same draws before and after a restart.
    return {name: tuple(_pick(pools[name], quota, rng)) for name in sorted(pools)}


def split(
    images: Mapping[str, Sequence[str]], share: float, rng: np.random.Generator
) -> tuple[dict[str, list[str]], list[HeldOut]]:
    """(to train on, held out): `share` of each class, at least one, at most HELD_OUT_A_CLASS."""
    train, held_out = {}, []
    for name, keys in images.items():
        count = min(max(1, round(share * len(keys))), HELD_OUT_A_CLASS)
        out = set(_pick(keys, count, rng))
        train[name] = [key for key in keys if key not in out]
        held_out += [HeldOut(key, name) for key in keys if key in out]
    return train, held_out


def bounded(held_out: Sequence[HeldOut], rng: np.random.Generator) -> tuple[HeldOut, ...]:
    """At most HELD_OUT_A_CLASS of each class, at random, however often it is extended."""
    own: dict[str, list[str]] = {}
    for sample in held_out:
        own.setdefault(sample.label, []).append(sample.key)
    kept = {key for name in sorted(own) for key in _pick(own[name], HELD_OUT_A_CLASS, rng)}
    return tuple(sample for sample in held_out if sample.key in kept)


def check_size(memory: Collection[str], new: Collection[str], size: int) -> None:
    """Every class needs at least one image in the memory."""
    count = len({*memory, *new})
    if count > size:
        raise BatchError([f"{count} classes do not fit a memory of {size} images: raise OPENWORLD_TRAIN_REPLAY_SIZE"])


def folds(labels: Sequence[int], count: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A fold for each image, each class spread evenly over them."""
    out = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(np.asarray(labels) == label))
        out[own] = np.arange(len(own)) % count
    return out


def _pick(keys: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """`count` of the keys at random, in their old order."""
    if len(keys) <= count:
        return list(keys)
    return [keys[i] for i in sorted(rng.choice(len(keys), count, replace=False))]
