import pytest

from models.network.backbone import open_backbone
from tests.support.exported import Exported, random_backbone


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A small transformer with two adapted blocks."""
    return Exported.of(random_backbone(tmp_path_factory.mktemp("small"), "tiny_test_vit", 2))


@pytest.fixture(scope="session")
def lite0(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """EfficientNet-Lite0, whose export takes seconds."""
    return Exported.of(open_backbone(tmp_path_factory.mktemp("lite0"), "tf_efficientnet_lite0", None, 1))
