from pathlib import Path

import pytest

from models.network.backbone import open_backbone
from tests.support.backbones import DEIT, write_random_deit


@pytest.fixture(scope="session")
def deit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_deit(tmp_path_factory.mktemp("weights") / "deit.safetensors")


@pytest.fixture(scope="session")
def deit_folder(deit_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a random DeiT-Ti and two adapted blocks. Do not change it."""
    root = tmp_path_factory.mktemp("folder")
    open_backbone(root, DEIT, deit_file, 2)
    return root
