"""The benchmark of adapted blocks judges a task on images that it has not learned."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.accuracy import adapted_blocks
from benchmarks.accuracy.data import ImageSet


def test_no_learned_image_is_a_test_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted_blocks, "KNOWN", 3)
    monkeypatch.setattr(adapted_blocks, "UNKNOWN", 2)
    images = ImageSet.made(7, 6, 1)
    stream = adapted_blocks.one_task(images, per_class=3, order=0)
    learned = {key for keys in stream.tasks[0].values() for key in keys}
    assert len(learned) == 15
    assert not learned & set(stream.test_keys)
    assert len(set(stream.test_keys)) == len(stream.test_keys)
    labels = [images.classes[images.tensors["train.labels"][int(key.split("/")[1])]] for key in stream.test_keys]
    known = [label for label in labels if label in stream.classes]
    assert np.bincount(stream.labels + 1).tolist() == [4, 3, 3, 3, 3, 3]
    assert [stream.classes[c] for c in stream.labels if c >= 0] == known
