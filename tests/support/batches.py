"""Labelled batches for tests."""

from collections.abc import Collection, Iterable
from functools import partial

import pytest

from tasks.batch import BatchCheck, BatchLimits, LabelledBatch
from tasks.batch.check import DEFAULT_LIMITS
from tasks.errors import BatchError
from tests.support.images import make_image

Items = list[tuple[str, str, bytes]]  # label, origin, image


def items(**classes: list[bytes]) -> Items:
    return [(name, f"{name}/{at}.jpg", data) for name, images in classes.items() for at, data in enumerate(images)]


def one_class(name: str) -> Items:
    return [(name, "a.jpg", make_image(0)), (name, "b.jpg", make_image(1))]


def check_batch(
    items: Iterable[tuple[str, str, bytes]],
    known_classes: Collection[str] = (),
    limits: BatchLimits = DEFAULT_LIMITS,
) -> LabelledBatch:
    """Check images that are in memory, given as `(label, origin, data)`."""
    check = BatchCheck(known_classes, limits)
    for label, origin, data in items:
        check.add(label, origin, partial(bytes, data))
    return check.finish()


def batch_problems(given: Items, known: Collection[str] = (), limits: BatchLimits = DEFAULT_LIMITS) -> list[str]:
    with pytest.raises(BatchError) as caught:
        check_batch(given, known, limits)
    return caught.value.problems
