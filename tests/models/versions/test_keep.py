"""What a data folder keeps: recorded by the first program that opens it with a setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.errors import KeepError
from models.versions.keep import RECORD, Keep, check_keep, open_keep


@pytest.mark.parametrize("keep", ["features", "statistics"])
def test_a_new_folder_records_what_it_keeps_and_keeps_no_more(tmp_path: Path, keep: Keep) -> None:
    assert open_keep(tmp_path, keep) == keep
    assert (tmp_path / RECORD).read_text() == f"{keep}\n"
    assert open_keep(tmp_path, None) == keep
    with pytest.raises(KeepError, match=f"keeps {keep}, but OPENWORLD_TRAIN_KEEP is images: unset"):
        open_keep(tmp_path, "images")


def test_a_check_writes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "robot"
    assert check_keep(data, "features") == "features"
    assert check_keep(data, None) == "images"
    assert not data.exists()
    open_keep(data, "features")
    assert check_keep(data, None) == check_keep(data, "features") == "features"
    with pytest.raises(KeepError, match="keeps features, but OPENWORLD_TRAIN_KEEP is statistics"):
        check_keep(data, "statistics")
