"""A labelled batch: images with the class that people gave them, checked as a whole before anything is learned.

Somebody who labelled a thousand images wants one list of what is wrong, not one complaint an upload. `BatchCheck`
therefore never stops at a problem: it collects all of them and raises one `BatchError`, a line each with its remedy.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

from models.errors import ImageError, UnsupportedImage
from models.files import sha256_bytes
from models.images import read_image
from tasks.batch.class_names import MAX_NAME, NAMED, canonical, confusion_problems, name_problems, shown
from tasks.errors import BatchError


@dataclass(frozen=True)
class LabelledImage:
    """One image of a batch; `origin` is where a person finds it again (a file name, an upload's name)."""

    sha256: str
    label: str
    data: bytes
    origin: str

    def __repr__(self) -> str:
        return f"LabelledImage({self.label!r}, {self.origin!r}, {len(self.data)} bytes)"


@dataclass(frozen=True)
class LabelledBatch:
    """Images that passed the check; `duplicates` counts copies within a class that were left out."""

    images: tuple[LabelledImage, ...]
    duplicates: int = 0

    @cached_property
    def counts(self) -> dict[str, int]:
        """Images a class, in the order of `classes`."""
        return dict(sorted(Counter(image.label for image in self.images).items()))

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @property
    def keys(self) -> dict[str, list[str]]:
        """Class -> the hashes of its images."""
        return {name: [image.sha256 for image in self.images if image.label == name] for name in self.classes}

    @property
    def task_id(self) -> str:
        """The beginning of the hash: short enough for people."""
        return self.sha256[:16]

    @cached_property
    def sha256(self) -> str:
        """The same for the same images under the same labels, wherever they come from and in whatever order."""
        pairs = sorted({(image.label, image.sha256) for image in self.images})
        # A class name holds no control character, so the separators cannot be forged.
        text = "".join(f"{label}\0{sha}\n" for label, sha in pairs)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def total_bytes(self) -> int:
        return sum(len(image.data) for image in self.images)


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold; a class that is already known needs one image only."""

    min_images_per_class: int = 2
    max_classes: int = 200
    max_images: int = 20_000
    max_bytes: int = 2 * 1024**3
    max_name: int = MAX_NAME


DEFAULT_LIMITS = BatchLimits()


def check_batch(
    items: Iterable[tuple[str, str, bytes]],
    known_classes: Collection[str] = (),
    limits: BatchLimits = DEFAULT_LIMITS,
) -> LabelledBatch:
    """The batch of `(label, origin, data)` items, or one `BatchError` that lists every problem in it."""
    check = BatchCheck(known_classes, limits)
    for label, origin, data in items:
        check.add(label, origin, data)
    return check.finish()


class BatchCheck:
    """Collects items and problems; `finish` returns the batch or raises them all."""

    def __init__(self, known_classes: Collection[str] = (), limits: BatchLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._known = {canonical(name) for name in known_classes}
        self._spellings: dict[str, None] = {}  # as given; a dict because it keeps the order, a set does not
        self._kept: dict[str, dict[str, LabelledImage]] = defaultdict(dict)  # sha256 -> label -> image
        self._reasons: dict[str, str] = {}  # sha256 -> why it cannot be read
        self._readable: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._images = self._bytes = self._duplicates = 0
        self._problems: list[str] = []
        self._unreadable: list[str] = []

    def problem(self, line: str) -> None:
        """A problem that was found elsewhere, to be raised with the others."""
        self._problems.append(line)

    def declare(self, label: str) -> None:
        """There is a class of this name, even when no image of it follows."""
        self._spellings[label] = None

    def unreadable(self, label: str, origin: str, reason: str) -> None:
        """An image that is there but could not be read."""
        self.declare(label)
        self._images += 1
        self._fail(label, origin, reason)

    def skip(self, label: str, size: int) -> None:
        """An image that counts towards the limits but is not looked at."""
        self.declare(label)
        self._images += 1
        self._bytes += size
        self._unread[canonical(label)] += 1

    def add(self, label: str, origin: str, data: bytes) -> None:
        """One item; it is decoded, because a file that only looks like an image would fail hours later."""
        if self._images >= self._limits.max_images or self._bytes + len(data) > self._limits.max_bytes:
            # Refused already: count on for the message, but spend neither memory nor time on the rest.
            self.skip(label, len(data))
            return
        self.declare(label)
        self._images += 1
        self._bytes += len(data)
        sha = sha256_bytes(data)
        name = canonical(label)
        if name in self._kept.get(sha, ()):
            self._duplicates += 1
            return
        if sha not in self._kept and sha not in self._reasons and (reason := _unreadable_because(data)):
            self._reasons[sha] = reason
        if sha in self._reasons:
            self._fail(label, origin, self._reasons[sha])
            return
        self._kept[sha][name] = LabelledImage(sha, name, data, origin)
        self._readable[name] += 1

    def finish(self) -> LabelledBatch:
        problems = [
            *self._problems,
            *shortened(self._name_problems(), "class names with problems: choose plain, different names"),
            *shortened(self._count_problems(), "classes with too few images: add images or remove the classes"),
            *shortened(self._unreadable, "files that cannot be read: replace or remove them"),
            *shortened(self._conflicts(), "images in more than one class: keep each in one class"),
            *self._limit_problems(),
        ]
        if not problems and not self._spellings:
            problems = ["the batch is empty: give at least one class with its images"]
        if problems:
            raise BatchError(problems)
        images = [image for labels in self._kept.values() for image in labels.values()]
        # In one order, so that the same batch trains the same whatever order it arrived in.
        images.sort(key=lambda image: (image.label, image.sha256))
        return LabelledBatch(tuple(images), self._duplicates)

    def _fail(self, label: str, origin: str, reason: str) -> None:
        self._failed[canonical(label)] += 1
        self._unreadable.append(f"{shown(origin)} cannot be read ({' '.join(reason.split())}): replace or remove it")

    def _name_problems(self) -> list[str]:
        problems = [line for label in self._spellings for line in name_problems(label, self._limits.max_name)]
        return [*problems, *confusion_problems(self._spellings, self._known)]

    def _count_problems(self) -> list[str]:
        problems = []
        for name in dict.fromkeys(canonical(label) for label in self._spellings):
            least = 1 if name in self._known else self._limits.min_images_per_class
            usable = self._readable[name] + self._unread[name]
            if usable >= least:
                continue
            remedy = f"add images until it has {least}, or remove the class"
            if usable:
                only = "1 image only" if usable == 1 else f"{usable} images only"
                problems.append(f"class {shown(name)} has {only}, copies and unreadable files not counted: {remedy}")
            elif self._failed[name]:
                problems.append(f"class {shown(name)} has no image that can be read: {remedy}")
            else:
                problems.append(f"class {shown(name)} is empty: {remedy}")
        return problems

    def _conflicts(self) -> list[str]:
        problems = []
        for labels in self._kept.values():
            if len(labels) > 1:
                places = " and ".join(
                    f"{shown(i.origin)} (class {shown(i.label)})" for i in list(labels.values())[:NAMED]
                )
                problems.append(f"the same image is in {len(labels)} classes, {places}: keep it in one of them")
        return problems

    def _limit_problems(self) -> list[str]:
        limits, classes = self._limits, len(self._spellings)
        remedy = "split the batch"
        problems = []
        if classes > limits.max_classes:
            problems.append(f"{classes} classes are more than the limit of {limits.max_classes}: {remedy}")
        if self._images > limits.max_images:
            problems.append(f"{self._images} images are more than the limit of {limits.max_images}: {remedy}")
        if self._bytes > limits.max_bytes:
            problems.append(f"{self._bytes} bytes are more than the limit of {limits.max_bytes}: {remedy}")
        return problems


def shortened(lines: list[str], rest: str) -> list[str]:
    """The first lines, then how many more there are."""
    return lines if len(lines) <= NAMED else [*lines[:NAMED], f"and {len(lines) - NAMED} more {rest}"]


def _unreadable_because(data: bytes) -> str | None:
    try:
        read_image(data)
    except UnsupportedImage:
        return "not a JPEG, PNG or WebP" if data else "the file is empty"
    except ImageError as error:
        return str(error)
    return None
