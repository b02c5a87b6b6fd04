"""A data folder with three versions, and learning in it on the tiny backbone."""

from pathlib import Path

import pytest


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data folders have the tiny backbone."""
    # Imported here: the tests of this folder are skipped without torch.
    from tests.support.exported import export_once
    from tests.support.tiny_model import tiny_backbone
    from trainer import context

    monkeypatch.setattr(context, "open_backbone", lambda *arguments: tiny_backbone())
    monkeypatch.setattr(context, "export", export_once)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    from tests.support.servers import learned_folder

    return learned_folder(tmp_path / "data")
