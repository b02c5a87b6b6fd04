"""The predictor: a data folder answers as torch does, image by image."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from models.errors import CorruptVersion, NothingLearned, UnsupportedImage
from models.inference.answer import Answer, answer
from models.inference.model import Model
from models.inference.predictor import Predictor
from models.inference.runtime import CHUNK, ROLES
from models.inference.stored_model import model_tensors
from models.versions.store import VersionStore
from tests.support.exported import (
    SCENE_TASKS,
    SCENES,
    Exported,
    features_in_torch,
    learn,
    pixels_of,
    random_pixels,
    read_scene,
    torch_tokens,
)
from tests.support.manifests import manifest_of


def publish(root: Path, exported: Exported, model: Model, roles: Sequence[str] = ROLES) -> int:
    store = VersionStore(root)
    graphs = {role: store.add_graph(exported.graphs[role]) for role in roles}
    manifest = manifest_of(model, exported.backbone.spec, parent=store.current(), graphs=graphs)
    return store.publish(manifest, model_tensors(model), {}).version


def test_a_data_folder_gives_the_answers_of_torch_and_one_error_per_bad_image(small: Exported, tmp_path: Path) -> None:
    model = learn(small.backbone, SCENE_TASKS, read_scene)
    version = publish(tmp_path, small, model)
    images = [read_scene(key) for key in SCENES[::7]]  # more than one chunk
    predictor = Predictor.open(tmp_path, device="cpu", threads=1)
    answers = predictor.predict([*images[:3], b"not an image", *images[3:]])
    assert predictor.version == version
    assert isinstance(answers.pop(3), UnsupportedImage)
    tokens = torch_tokens(small.backbone, pixels_of(small.backbone, images))
    expected = answer(model, model.evidence(features_in_torch(small.backbone, model, tokens)))
    assert len(images) > CHUNK
    assert [(a.label, a.novel) for a in answers if isinstance(a, Answer)] == [(a.label, a.novel) for a in expected]
    assert predictor.predict([]) == []


def test_an_older_version_can_be_opened(small: Exported, tmp_path: Path) -> None:
    for count in (1, 2):
        publish(tmp_path, small, learn(small.backbone, SCENE_TASKS[:count], read_scene, epochs=1))
    assert [len(Predictor.open(tmp_path, n, "cpu", 1).model.tasks) for n in (None, 1, 2)] == [2, 1, 2]


def test_an_empty_folder_has_learned_nothing(tmp_path: Path) -> None:
    with pytest.raises(NothingLearned):
        Predictor.open(tmp_path)


def test_a_version_without_its_graphs_is_refused(small: Exported, tmp_path: Path) -> None:
    publish(tmp_path, small, learn(small.backbone, SCENE_TASKS[:1], read_scene, epochs=1), roles=["trunk"])
    with pytest.raises(CorruptVersion, match="no graph for blocks and frozen"):
        Predictor.open(tmp_path, device="cpu")


def test_no_images_give_no_features(small: Exported) -> None:
    model = learn(small.backbone, SCENE_TASKS[:1], read_scene, epochs=1)
    features = small.runtime.features(model, random_pixels(small.backbone, 0))
    assert [part.shape for part in features.tasks] == [(0, 32)]
    assert (features.frozen.shape, features.expanded.shape) == ((0, 64), (0, 1024))
