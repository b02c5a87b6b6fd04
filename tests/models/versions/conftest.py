from pathlib import Path

import pytest

from models.versions.store import VersionStore


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """An empty store."""
    return VersionStore(tmp_path / "data")
