"""A trainer removes its copies of images that were erased on another machine, also through an outage of the store."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tasks.images import ImageStore, record_erasure
from tests.support.object_stores import memory_storage, outage
from trainer.worker.worker import _RemoteErasures


def copies(root: Path) -> int:
    return sum(path.is_file() for path in (root / "objects").rglob("*"))


@pytest.mark.parametrize("answered", [0, 1, 2], ids=["no answer", "one entry", "the log, but no image"])
def test_an_outage_delays_the_removal_of_copies(tmp_path: Path, answered: int) -> None:
    storage = memory_storage(tmp_path)
    images = ImageStore(storage)
    erasures = _RemoteErasures(storage)
    erasures.apply()
    shas = [images.put(data) for data in (b"one face", b"another face")]
    assert [images.read(sha) for sha in shas] == [b"one face", b"another face"]
    assert copies(tmp_path) == 2
    for sha in shas:
        record_erasure(storage, [sha], "another machine")
        storage._client.delete(images._key(sha))
    with outage(after=answered):
        erasures.apply()
    assert copies(tmp_path) == 2
    erasures.apply()
    assert copies(tmp_path) == 0
