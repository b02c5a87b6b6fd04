"""Serving rotations without torch: the answers of a version of CSI are those of its networks in torch."""

from pathlib import Path

import numpy as np
import pytest

from models.inference import runtime
from models.inference.evidence import Features
from models.inference.model import Model
from models.inference.predictor import Predictor
from models.inference.rotations import TurnedHeads, turn
from models.inference.stored_model import model_tensors
from models.versions.store import VersionStore
from tests.support.exported import (
    SCENE_TASKS,
    SCENES,
    TOLERANCE,
    Exported,
    Floats,
    features_in_torch,
    learn,
    pixels_of,
    random_pixels,
    read_scene,
    torch_tokens,
)
from tests.support.manifests import manifest_of


def rotated_in_torch(exported: Exported, model: Model, pixels: Floats) -> Features:
    every = [
        features_in_torch(exported.backbone, model, torch_tokens(exported.backbone, turn(pixels, turns)))
        for turns in range(4)
    ]
    return Features(
        np.stack(every[0].tasks), every[0].frozen, every[0].expanded, turned=np.stack([own.tasks for own in every[1:]])
    )


@pytest.mark.parametrize("method", ["hat-csi", "sup-csi"])
def test_a_stored_version_answers_with_four_rotations_as_torch_does(
    small: Exported, tmp_path: Path, method: str
) -> None:
    model = learn(small.backbone, SCENE_TASKS, read_scene, method=method, epochs=1)
    store = VersionStore(tmp_path)
    graphs = {role: store.add_graph(small.graphs[role]) for role in runtime.ROLES}
    store.publish(manifest_of(model, small.backbone.spec, graphs=graphs), model_tensors(model), {})
    predictor = Predictor.open(tmp_path, device="cpu", threads=1)
    pixels = pixels_of(small.backbone, [read_scene(key) for key in SCENES[::7]])
    assert len(pixels) > runtime.CHUNK  # more than one chunk
    served = predictor.runtime.features(predictor.model, pixels)
    found = predictor.model.evidence(served)
    expected = model.evidence(rotated_in_torch(small, model, pixels))
    np.testing.assert_allclose(found.class_logits, expected.class_logits, atol=20 * TOLERANCE)
    np.testing.assert_allclose(found.class_distances, expected.class_distances, rtol=1e-2)
    upright = predictor.model.evidence(Features(served.tasks, served.frozen, served.expanded))
    assert np.abs(upright.class_logits - found.class_logits).max() > 20 * TOLERANCE  # rotations count


@pytest.mark.parametrize("chosen", [{}, {"method": "hat-csi", "rotations": 1}])
def test_no_image_is_turned_for_a_rule_without_rotations(
    small: Exported, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, object]
) -> None:
    model = learn(small.backbone, SCENE_TASKS[:1], read_scene, epochs=1, **chosen)

    def turning(pixels: Floats) -> Floats:
        raise AssertionError("an image is turned")

    monkeypatch.setattr(runtime, "with_turned", turning)
    assert small.runtime.features(model, random_pixels(small.backbone, 2)).turned is None


def test_a_task_without_outputs_for_turned_images_is_refused() -> None:
    with pytest.raises(ValueError, match="a task has no outputs for them"):
        TurnedHeads([(np.zeros((3, 2, 4), np.float32), np.zeros((3, 2), np.float32)), (None, None)])
