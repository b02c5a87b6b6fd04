"""The torch program of the serving benchmark gives the answers of the service, so that only the speed differs."""

from pathlib import Path

import pytest

from benchmarks.serving.apps.torch_recogniser import TorchRecogniser
from models.inference.answer import Answer
from models.inference.predictor import Predictor
from models.inference.stored_model import model_tensors
from models.versions.store import VersionStore
from tests.support.exported import SCENE_TASKS, SCENES, Exported, learn, random_backbone, read_scene
from tests.support.manifests import manifest_of


def test_the_torch_program_gives_the_answers_of_the_service(tmp_path: Path) -> None:
    exported = Exported.of(random_backbone(tmp_path, "tiny_test_vit", 2))
    model = learn(exported.backbone, SCENE_TASKS, read_scene, epochs=1)
    store = VersionStore(tmp_path / "data")
    graphs = {role: store.add_graph(data) for role, data in exported.graphs.items()}
    store.publish(manifest_of(model, exported.backbone.spec, graphs=graphs), model_tensors(model), {})
    images = [read_scene(key) for key in SCENES[::30]]
    recogniser = TorchRecogniser(tmp_path / "data", 1)
    for image, served in zip(images, Predictor.open(tmp_path / "data", device="cpu").predict(images), strict=True):
        assert isinstance(served, Answer)
        (in_torch,) = recogniser.answers([image])
        assert (in_torch["label"], in_torch["novel"]) == (served.label, served.novel)
        assert in_torch["score"] == pytest.approx(served.score, abs=1e-3)
