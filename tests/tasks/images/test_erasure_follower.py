"""Following the log of erasures in an object store that does not always answer."""

from pathlib import Path

import pytest

from models.storage import StoreUnavailable
from tasks.images import ErasureFollower, record_erasure
from tests.support.object_stores import memory_storage, outage


def test_each_erasure_is_read_once(tmp_path: Path) -> None:
    storage = memory_storage(tmp_path)
    record_erasure(storage, ["aa"], "earlier")
    follower = ErasureFollower(storage)
    assert follower.new() == set()
    record_erasure(storage, ["bb"], "operator")
    record_erasure(storage, ["cc", "dd"], "operator")
    assert follower.new() == {"bb", "cc", "dd"}
    assert follower.new() == set()


def test_an_outage_between_two_entries_loses_none(tmp_path: Path) -> None:
    storage = memory_storage(tmp_path)
    follower = ErasureFollower(storage)
    for sha256 in ("aa", "bb", "cc"):
        record_erasure(storage, [sha256], "operator")
    with outage(after=2):
        assert follower.new() == {"aa", "bb"}
        with pytest.raises(StoreUnavailable):
            follower.new()
    assert follower.new() == {"cc"}
