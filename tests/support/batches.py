"""Labelled batches for tests."""

from collections.abc import Collection, Iterable
from functools import partial

from tasks.batch.check import DEFAULT_LIMITS, BatchCheck, BatchLimits, LabelledBatch


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
