"""The images that a version keeps: the replay memory and the held-out images.

The memory is trained on again: as `ood` for other tasks, as its own classes for its own head. No network is ever
trained on a held-out image, neither as its class nor as `ood`: held-out images calibrate the decisions and judge the
next version. The closed-form statistics use both, because an image can be subtracted from them again.
"""

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import TypeAdapter

from tasks.batch import shortened
from tasks.errors import BatchError

HOLD_OUT_FROM = 3  # a class with fewer images is trained on all of them


@dataclass(frozen=True)
class HeldOut:
    """An image for calibration and evaluation."""

    key: str
    label: str


@dataclass(frozen=True)
class Samples:
    """All images that a version names."""

    memory: dict[str, tuple[str, ...]] = field(default_factory=dict)  # class -> image keys
    held_out: tuple[HeldOut, ...] = ()
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # every image ever learned, kept or not
    # Of a provisional version: the images of each pending task, by class. No other part names them yet.
    pending: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """The images that must be kept."""
        pending = {key for images in self.pending.values() for keys in images.values() for key in keys}
        return self.learned_keys | pending

    @property
    def learned_keys(self) -> set[str]:
        return {key for keys in self.memory.values() for key in keys} | {sample.key for sample in self.held_out}

    def with_pending_seen(self) -> "Samples":
        """The samples as if the images of the pending tasks had been learned."""
        out: Samples = self
        for images in self.pending.values():
            out = with_batch(out, images).samples
        return out

    def without_missing(self, present: Container[str]) -> Self:
        """The samples without deleted images. A class without images stays in the memory."""
        memory = {name: tuple(key for key in keys if key in present) for name, keys in self.memory.items()}
        held_out = tuple(sample for sample in self.held_out if sample.key in present)
        pending = {
            task: {name: tuple(key for key in keys if key in present) for name, keys in images.items()}
            for task, images in self.pending.items()
        }
        return replace(self, memory=memory, held_out=held_out, pending=pending)

    def without(self, keys: Container[str]) -> Self:
        """The samples as if these images had never been learned."""
        memory = {name: tuple(key for key in own if key not in keys) for name, own in self.memory.items()}
        seen = {name: tuple(key for key in own if key not in keys) for name, own in self.seen.items()}
        held_out = tuple(sample for sample in self.held_out if sample.key not in keys)
        return replace(self, memory=memory, held_out=held_out, seen=seen)

    def hashes_only(self) -> Self:
        """The samples without images to keep; every class stays in the memory."""
        return replace(self, memory=dict.fromkeys(self.memory, ()), held_out=())

    def to_json(self) -> dict[str, Any]:
        """Without copies of the keys: there are thousands."""
        parts = {"memory": self.memory, "seen": self.seen, "pending": self.pending}
        return {**parts, "held_out": [{"key": sample.key, "label": sample.label} for sample in self.held_out]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return TypeAdapter(cls).validate_python(data)


def corrections(images: Mapping[str, Sequence[str]], samples: Samples) -> dict[str, str]:
    """The images of a batch that were learned under another label, with that label.

    `BatchError` if a class would keep no image.
    """
    earlier = {key: name for name, keys in samples.seen.items() for key in keys}
    corrected = {
        key: earlier[key] for name, keys in sorted(images.items()) for key in keys if earlier.get(key, name) != name
    }
    lost = Counter(corrected.values())
    if emptied := sorted(name for name, count in lost.items() if count == len(samples.seen[name])):
        problems = [
            f"every image of {name!r} gets another label: rename or merge the class instead" for name in emptied
        ]
        raise BatchError(shortened(problems, "classes that would keep no image: rename or merge them instead"))
    return corrected


def unseen(images: Mapping[str, Sequence[str]], samples: Samples) -> dict[str, list[str]]:
    """The images of a batch that were not learned under their label before; an image learned twice would count twice.

    `BatchError` if there are none.
    """
    new = {name: [key for key in keys if key not in samples.seen.get(name, ())] for name, keys in images.items()}
    new = {name: keys for name, keys in sorted(new.items()) if keys}
    if not new:
        raise BatchError(["every image of this batch is learned already: add images that are not"])
    return new


class AddedBatch(NamedTuple):
    """Samples with the images of a batch, all of them in the memory."""

    samples: Samples
    corrected: dict[str, str]  # images that lost another label, with that label
    fresh: dict[str, list[str]]  # images that have their label now, by class


def with_batch(samples: Samples, images: Mapping[str, Sequence[str]]) -> AddedBatch:
    """`BatchError` if there is nothing to add, or if a class would keep no image."""
    corrected = corrections(images, samples)
    samples = samples.without(corrected)
    fresh = unseen(images, samples)
    samples = replace(samples, memory=merged(samples.memory, fresh), seen=merged(samples.seen, fresh))
    return AddedBatch(samples, corrected, fresh)


def merged(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The keys of both, per class; the classes of `old` come first."""
    return {name: (*old.get(name, ()), *new.get(name, ())) for name in {**old, **new}}


def remember(
    memory: Mapping[str, Sequence[str]],
    new: Mapping[str, Sequence[str]],
    held_out: Collection[HeldOut],
    per_class: int,
    total: int | None,
    rng: np.random.Generator,
) -> dict[str, tuple[str, ...]]:
    """The next memory, chosen at random from old and new images.

    Each class has room for `per_class` images, those held out included, and for an equal share of `total`, if given.
    """
    check_size(memory, new, total)
    pools = {name: tuple(dict.fromkeys(keys)) for name, keys in merged(memory, new).items()}
    taken = Counter(sample.label for sample in held_out)
    share = per_class if total is None else total // max(len(pools), 1)
    # Sorted by name, the order in which a stored version is read: the draws are the same before and after a restart.
    return {
        name: tuple(_choose(pools[name], max(1, min(share, per_class - taken[name])), rng)) for name in sorted(pools)
    }


def check_size(memory: Collection[str], new: Collection[str], total: int | None) -> None:
    """`BatchError` unless a memory of a fixed total holds at least one image per class."""
    count = len({*memory, *new})
    if total is not None and count > total:
        raise BatchError([f"{count} classes do not fit a memory of {total} images: raise OPENWORLD_TRAIN_REPLAY_SIZE"])


def split(
    images: Mapping[str, Sequence[str]], groups: Mapping[str, int], share: float, most: int, rng: np.random.Generator
) -> tuple[dict[str, list[str]], list[HeldOut]]:
    """(training images, held-out images): hold out about `share` of each class, at least one, at most `most`.

    Images of one likeness group, by image key, stay together; if all groups of a class are larger, it is the smallest.
    Of two large groups, a part of one is held out: training needs both. A class with fewer than HOLD_OUT_FROM images,
    or with one group only, is trained on whole.
    """
    train: dict[str, list[str]] = {}
    held_out: list[HeldOut] = []
    for name, keys in images.items():
        out: set[str] = set()
        if len(keys) >= HOLD_OUT_FROM:
            out = _held_out_of(keys, groups, min(max(1, round(share * len(keys))), most), rng)
        train[name] = [key for key in keys if key not in out]
        held_out += [HeldOut(key, name) for key in keys if key in out]
    return train, held_out


def _held_out_of(keys: Sequence[str], groups: Mapping[str, int], wanted: int, rng: np.random.Generator) -> set[str]:
    """About `wanted` images of a class."""
    members: dict[int, list[str]] = {}
    for key in keys:
        members.setdefault(groups[key], []).append(key)
    order = [members[group] for group in rng.permutation(sorted(members)).tolist()]
    smallest = min(order, key=len)
    if len(order) < 2:
        return set()
    if len(smallest) > wanted:
        return set(smallest if len(order) > 2 else _choose(smallest, wanted, rng))
    out: set[str] = set()
    for group in order:
        out |= set(group) if len(out) + len(group) <= wanted else set()
    return out


def spread_over_classes(images: Mapping[str, Sequence[str]], most: int | None) -> dict[str, list[str]]:
    """At most `most` images in all, as many of each class, at least one; None: all.

    The first ones by key, which is a hash: nearly the same ones after the next task, so their features are known.
    """
    share = None if most is None else max(1, most // max(len(images), 1))
    return {name: sorted(keys)[:share] for name, keys in images.items()}


def limit_held_out(held_out: Sequence[HeldOut], most: int, rng: np.random.Generator) -> tuple[HeldOut, ...]:
    """At most `most` images of each class, chosen at random."""
    keys: dict[str, list[str]] = {}
    for sample in held_out:
        keys.setdefault(sample.label, []).append(sample.key)
    kept = {key for name in sorted(keys) for key in _choose(keys[name], most, rng)}
    return tuple(sample for sample in held_out if sample.key in kept)


def _choose(keys: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """`count` of the keys at random, in their order."""
    if len(keys) <= count:
        return list(keys)
    return [keys[i] for i in sorted(rng.choice(len(keys), count, replace=False))]
