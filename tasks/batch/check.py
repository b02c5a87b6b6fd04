"""Check a labelled batch as a whole before anything is learned from it.

`BatchCheck` does not stop at the first problem: it collects all of them and raises one `BatchError` with one line per
problem. It reads each image once, to decode and hash it, and keeps no image bytes: `LabelledBatch.read` reads an
image again from where it lies.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from models.errors import ImageError, StoreError, UnsupportedImage
from models.files import sha256_bytes
from models.images import DEFAULT_LIMITS as DEFAULT_IMAGE_LIMITS
from models.images import ImageLimits, open_image
from tasks.batch.class_names import MAX_LISTED, canonical, confusion_problems, name_problems, quoted
from tasks.errors import BatchError

# Images that a class gains or loses at a time, in a data folder that keeps statistics. The sums of two versions differ
# by the images between them: a single one by its feature, and two features follow from their mean and their scatter.
# Of five images at most two are held out of a network, whose statistics are then over three.
LEAST_SUMMED = 5


@dataclass(frozen=True)
class LabelledImage:
    """One image of a batch; `origin` names its source in messages (a file, an upload, an id)."""

    sha256: str
    label: str
    origin: str


@dataclass(frozen=True)
class LabelledBatch:
    """Images that passed the check, by hash; their bytes stay where they lie."""

    images: tuple[LabelledImage, ...]
    read: Callable[[str], bytes] = field(repr=False, compare=False)  # sha256 -> the verified bytes, or StoreError
    duplicates: int = 0  # copies within a class, left out of `images`
    total_bytes: int = 0

    @cached_property
    def keys(self) -> dict[str, list[str]]:
        """Class -> hashes of its images, sorted by class."""
        keys: dict[str, list[str]] = {}
        for image in sorted(self.images, key=lambda image: image.label):
            keys.setdefault(image.label, []).append(image.sha256)
        return keys

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.keys)

    @property
    def counts(self) -> dict[str, int]:
        """Images per class."""
        return {name: len(keys) for name, keys in self.keys.items()}

    def warnings(self, known_classes: Collection[str], learned: Mapping[str, str] | None = None) -> list[str]:
        """One line per class that can be learned, but not well, and per class that loses images to another one.

        `learned` gives the label of each image that was learned before.
        """
        weak = [name for name, count in self.counts.items() if count == 1 and name not in known_classes]
        lines = [f"class {quoted(name)} has 1 image: more images make its answers better" for name in weak]
        pairs = ((learned.get(image.sha256, image.label), image.label) for image in self.images) if learned else ()
        moved = Counter((old, new) for old, new in pairs if old != new)
        moves = [
            f"class {quoted(old)} loses {count} {'image' if count == 1 else 'images'} to class {quoted(new)}: "
            f"{'it was' if count == 1 else 'they were'} learned as {quoted(old)} before"
            for (old, new), count in sorted(moved.items())
        ]
        return [*shortened(lines, "classes with 1 image"), *shortened(moves, "pairs of classes")]

    @property
    def task_id(self) -> str:
        return self.sha256[:16]

    @cached_property
    def sha256(self) -> str:
        """Hash of all labels and images; the order and the source of the images do not change it."""
        pairs = sorted({(image.label, image.sha256) for image in self.images})
        # Class names hold no control characters, so the separators cannot be forged.
        text = "".join(f"{label}\0{sha}\n" for label, sha in pairs)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold."""

    max_classes: int = 200
    max_images: int = 20_000
    max_bytes: int = 2 * 1024**3
    image: ImageLimits = DEFAULT_IMAGE_LIMITS


DEFAULT_LIMITS = BatchLimits()


class BatchCheck:
    """Collects images and problems; `finish` returns the batch or raises all problems as one `BatchError`."""

    def __init__(self, known_classes: Collection[str] = (), limits: BatchLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._known = {canonical(name) for name in known_classes}
        self._labels: dict[str, None] = {}  # as given, in order
        self._accepted: dict[str, dict[str, LabelledImage]] = defaultdict(dict)  # sha256 -> class -> image
        self._sources: dict[str, tuple[str, Callable[[], bytes]]] = {}  # sha256 -> origin, reader
        self._invalid: dict[str, str] = {}  # sha256 -> why the image cannot be decoded
        self._usable: Counter[str] = Counter()  # images per class, skipped ones included
        self._unreadable: Counter[str] = Counter()
        self._reported: set[str] = set()  # classes of images that the caller reported as a problem
        self._images = self._bytes = self._accepted_bytes = self._duplicates = 0
        self._problems: list[str] = []
        self._read_problems: list[str] = []

    def problem(self, line: str, label: str | None = None) -> None:
        """Add a problem that the caller found; `label` is the class of the image that is missing because of it."""
        self._problems.append(line)
        if label is not None:
            self._reported.add(canonical(label))

    def declare(self, label: str) -> None:
        """Add a class; without images it is reported as empty."""
        self._labels[label] = None

    def skip(self, label: str, size: int) -> None:
        """Count an image towards the limits without reading it."""
        self.declare(label)
        self._images += 1
        self._bytes += size
        self._usable[canonical(label)] += 1

    def add(self, label: str, origin: str, read: Callable[[], bytes]) -> None:
        """Read, decode and hash one image. `read` is kept and called again by `LabelledBatch.read`.

        OSError and StoreError from `read` become problems of the batch; other exceptions pass.
        """
        self.declare(label)
        try:
            data = read()
        except (OSError, StoreError) as error:
            self._images += 1
            self._reject(label, origin, reason_of(error))
            return
        if self._images >= self._limits.max_images or self._bytes + len(data) > self._limits.max_bytes:
            self.skip(label, len(data))  # refused already: count for the message, do not decode
            return
        self._images += 1
        self._bytes += len(data)
        sha, name = sha256_bytes(data), canonical(label)
        if name in self._accepted.get(sha, ()):
            self._duplicates += 1
            return
        if sha not in self._accepted and sha not in self._invalid:
            reason = _undecodable_because(data, self._limits.image)
            if reason is not None:
                self._invalid[sha] = reason
        if sha in self._invalid:
            self._reject(label, origin, self._invalid[sha])
            return
        self._accepted[sha][name] = LabelledImage(sha, name, origin)
        self._sources[sha] = origin, read
        self._accepted_bytes += len(data)
        self._usable[name] += 1

    def finish(self) -> LabelledBatch:
        names = [line for label in self._labels for line in name_problems(label)]
        names += confusion_problems(self._labels, self._known)
        problems = [
            *self._problems,
            *shortened(names, "class names with problems: choose plain, different names"),
            *shortened(self._count_problems(), "classes without images: add images or remove the classes"),
            *shortened(self._read_problems, "files that cannot be read: replace or remove them"),
            *shortened(self._conflicts(), "images in more than one class: keep each in one class"),
            *self._limit_problems(),
        ]
        if not problems and not self._labels:
            problems = ["the batch is empty: give at least one class with its images"]
        if problems:
            raise BatchError(problems)
        images = [image for labels in self._accepted.values() for image in labels.values()]
        # Sorted, so that the order of arrival does not change the training.
        images.sort(key=lambda image: (image.label, image.sha256))
        return LabelledBatch(tuple(images), self._read_again, self._duplicates, self._accepted_bytes)

    def _read_again(self, sha256: str) -> bytes:
        origin, read = self._sources[sha256]
        remedy = "leave the batch unchanged while it is read, and submit it again"
        try:
            data = read()
        except (OSError, StoreError) as error:
            raise StoreError(f"{quoted(origin)} cannot be read a second time ({reason_of(error)}): {remedy}") from error
        if sha256_bytes(data) != sha256:
            raise StoreError(f"{quoted(origin)} changed while the batch was read: {remedy}")
        return data

    def _reject(self, label: str, origin: str, reason: str) -> None:
        self._unreadable[canonical(label)] += 1
        line = f"{quoted(origin)} cannot be read ({' '.join(reason.split())}): replace or remove it"
        self._read_problems.append(line)

    def _count_problems(self) -> list[str]:
        problems = []
        for name in dict.fromkeys(canonical(label) for label in self._labels):
            if self._usable[name] or name in self._reported:
                continue
            state = "has no image that can be read" if self._unreadable[name] else "is empty"
            problems.append(f"class {quoted(name)} {state}: add images, or remove the class")
        return problems

    def _conflicts(self) -> list[str]:
        problems = []
        for labels in self._accepted.values():
            if len(labels) > 1:
                places = " and ".join(
                    f"{quoted(i.origin)} (class {quoted(i.label)})" for i in list(labels.values())[:MAX_LISTED]
                )
                problems.append(f"the same image is in {len(labels)} classes, {places}: keep it in one of them")
        return problems

    def _limit_problems(self) -> list[str]:
        counts = (
            (len(self._labels), "classes", self._limits.max_classes),
            (self._images, "images", self._limits.max_images),
            (self._bytes, "bytes", self._limits.max_bytes),
        )
        return [
            f"{count} {what} are more than the limit of {limit}: split the batch"
            for count, what, limit in counts
            if count > limit
        ]


def check_summed(gained: Mapping[str, int], lost: Mapping[str, int], left: Mapping[str, int]) -> None:
    """`BatchError` if a class gains, loses or is left with fewer than LEAST_SUMMED images.

    For a folder that keeps statistics. `left` are the images of classes that lose some.
    """
    problems = [
        f"class {quoted(name)} {verb} {count} of at least {LEAST_SUMMED} images: this data folder keeps statistics, "
        "none of which may be of a single image; add images"
        for verb, changes in (("gains", gained), ("loses", lost), ("is left with", left))
        for name, count in changes.items()
        if count < LEAST_SUMMED
    ]
    if problems:
        raise BatchError(shortened(problems, f"classes that change by fewer than {LEAST_SUMMED} images: add images"))


def shortened(lines: list[str], rest: str) -> list[str]:
    """The first lines, then how many more there are."""
    return lines if len(lines) <= MAX_LISTED else [*lines[:MAX_LISTED], f"and {len(lines) - MAX_LISTED} more {rest}"]


def reason_of(error: Exception) -> str:
    """The error's text on one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())


def _undecodable_because(data: bytes, limits: ImageLimits) -> str | None:
    try:
        with open_image(data, limits):
            pass
    except UnsupportedImage:
        return "not a JPEG, PNG or WebP" if data else "the file is empty"
    except ImageError as error:
        return str(error)
    return None
