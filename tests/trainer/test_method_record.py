"""The method of a data folder: chosen with its first task, recorded in every version, kept afterwards."""

import pytest

from models.errors import MethodError
from tests.support.manifests import make_manifest
from trainer.learning.settings import LearnerSettings
from trainer.parent import with_method


def test_a_new_folder_takes_the_method_that_is_set() -> None:
    assert with_method(LearnerSettings(method="sup-csi"), None).method == "sup-csi"
    assert with_method(LearnerSettings(), None).method == "more"


def test_a_folder_keeps_the_method_of_its_versions() -> None:
    current = make_manifest(settings={"method": "hat-csi"})
    assert with_method(LearnerSettings(), current).method == "hat-csi"
    assert with_method(LearnerSettings(method="hat-csi"), current).method == "hat-csi"
    with pytest.raises(MethodError, match="learned with hat-csi, but OPENWORLD_TRAIN_METHOD is more: unset"):
        with_method(LearnerSettings(method="more"), current)


def test_versions_of_older_releases_were_learned_with_more() -> None:
    current = make_manifest(settings={})
    assert with_method(LearnerSettings(), current).method == "more"
    with pytest.raises(MethodError, match="learned with more"):
        with_method(LearnerSettings(method="sup-csi"), current)


@pytest.mark.parametrize("rotations", [0, 2, 3, 5])
def test_an_image_answers_upright_or_in_all_rotations(rotations: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or 4"):
        LearnerSettings(rotations=rotations)
