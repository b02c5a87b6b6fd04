"""The time of an image, by which erasure tells whether it was submitted again."""

import os
import time
from pathlib import Path

from tasks.images import ImageStore


def test_an_image_that_is_stored_again_is_as_old_as_the_second_call(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    sha256 = store.put(b"image")
    os.utime(tmp_path / "images" / sha256[:2] / sha256, (0, 0))
    before = time.time()
    store.put(b"image")
    found = store.find(sha256)
    assert found is not None
    assert before <= found.time <= time.time()
