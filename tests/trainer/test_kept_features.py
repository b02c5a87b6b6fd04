"""A data folder that keeps features learns the same bytes as one that keeps images, and has no image at any time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from models.errors import KeepError
from models.files import sha256_bytes
from models.network.backbone import Backbone
from models.versions.keep import record_less, recorded_keep
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch
from tasks.images import FeatureStore, ImageStore, Retention, cache_files
from tests.support.batches import check_batch
from tests.support.object_stores import memory_storage
from tests.support.tiny_model import TinyImages, tiny_settings
from trainer.learning import gate
from trainer.learning.memory import Samples
from trainer.publish import Outcome, learn_batch

pytestmark = pytest.mark.usefixtures("restore_torch_settings", "tiny")


def task(number: int, images: int = 12) -> LabelledBatch:
    """Two new classes."""
    return check_batch(
        (f"class {c}", f"{n}.png", TinyImages().read(f"class {c}/{n}"))
        for c in (2 * number, 2 * number + 1)
        for n in range(images)
    )


def learn(data: Path, batch: LabelledBatch, keep: str | None, **more: object) -> Outcome:
    settings = tiny_settings(keep=keep, replay_size=None, keep_per_class=6, gate_accuracy=1, gate_auc=1, **more)
    return learn_batch(data, batch, settings, lambda event: None)


def contents(data: Path) -> dict[str, str]:
    """The hash of each content of the current version."""
    manifest = VersionStore(data).current_manifest()
    assert manifest is not None
    return {role: entry.sha256 for role, entry in manifest.files.items()}


@pytest.mark.parametrize(
    "settings", [{"views": 1}, {"views": 2}, {"method": "hat-csi"}], ids=["one view", "two views", "hat-csi"]
)
def test_features_give_the_same_version_as_images(tmp_path: Path, settings: dict[str, object]) -> None:
    for keep in ("images", "features"):
        for number in range(3):
            outcome = learn(tmp_path / keep, task(number), keep if number == 0 else None, **settings)
            assert (outcome.state, outcome.manifest.keep) == ("published", keep)
    assert contents(tmp_path / "features") == contents(tmp_path / "images")
    folder = tmp_path / "features"
    named = Samples.from_json(VersionStore(folder).samples(3)).keys
    assert list(ImageStore(folder)) == []
    assert {found.sha256 for found in FeatureStore(folder)} == named
    assert {file.sha256 for file in cache_files(folder)} <= named
    assert len(named) < 72  # of the other images nothing is kept


def test_a_rejected_batch_leaves_nothing_of_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(tmp_path, task(0), "features")
    before = {found.sha256 for found in FeatureStore(tmp_path)}
    monkeypatch.setattr(gate, "_reasons", lambda *arguments: ["a reason"])
    assert learn(tmp_path, task(1), None).state == "rejected"
    images = {image.sha256 for image in task(1).images}
    assert {found.sha256 for found in FeatureStore(tmp_path)} == before
    assert not images & {file.sha256 for file in cache_files(tmp_path)}


def test_an_erased_image_loses_its_features_and_is_not_replayed(tmp_path: Path) -> None:
    learn(tmp_path, task(0), "features")
    store = VersionStore(tmp_path)
    erased = Samples.from_json(store.samples(1)).memory[next(iter(store.samples(1)["memory"]))][0]
    assert [one.sha256 for one in Retention(store).remove(erased, "operator")] == [erased]
    assert erased not in FeatureStore(tmp_path)
    learn(tmp_path, task(1), None)
    assert erased not in Samples.from_json(store.samples(2)).keys
    assert not list(tmp_path.rglob(f"*{erased}*"))


def test_a_setting_that_differs_from_the_record_is_refused_with_the_way_out(tmp_path: Path) -> None:
    learn(tmp_path / "few", task(0), "features")
    with pytest.raises(KeepError, match="keeps features, but OPENWORLD_TRAIN_KEEP is images: unset"):
        learn(tmp_path / "few", task(1), "images")
    learn(tmp_path / "all", task(0), None)
    with pytest.raises(KeepError, match="openworld convert --keep features"):
        learn(tmp_path / "all", task(1), "features")
    assert (recorded_keep(tmp_path / "few"), recorded_keep(tmp_path / "all")) == ("features", "images")
    assert not (tmp_path / "all" / "KEEP").exists()  # as before this setting


def test_features_of_an_image_are_durable_and_checked(tmp_path: Path) -> None:
    learn(tmp_path, task(0), "features")
    found = next(iter(FeatureStore(tmp_path)))
    path = next(tmp_path.glob(f"features/*/{found.sha256}-tokens"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match="damaged: restore a backup, or erase the image"):
        FeatureStore(tmp_path).get(found.sha256)
    assert FeatureStore(tmp_path).get(sha256_bytes(b"another image")) is None


def test_features_in_an_object_store_give_the_same_version(tmp_path: Path) -> None:
    learn(tmp_path / "images", task(0), None)
    learn(tmp_path / "images", task(1), None)
    storage = memory_storage(tmp_path / "first")
    for number in range(2):
        settings = tiny_settings(keep="features", replay_size=None, keep_per_class=6, gate_accuracy=1, gate_auc=1)
        assert learn_batch(storage, task(number), settings, lambda event: None).state == "published"
    manifest = VersionStore(storage).current_manifest()
    assert manifest is not None
    assert {role: entry.sha256 for role, entry in manifest.files.items()} == contents(tmp_path / "images")
    assert list(ImageStore(storage)) == []
    assert {found.sha256 for found in FeatureStore(storage)} == Samples.from_json(VersionStore(storage).samples(2)).keys


def test_a_training_during_a_conversion_on_another_machine_publishes_what_the_folder_keeps_then(tmp_path: Path) -> None:
    storage = memory_storage(tmp_path)
    settings = tiny_settings(replay_size=None, keep_per_class=6, gate_accuracy=1, gate_auc=1)
    learn_batch(storage, task(0), settings, lambda event: None)
    outcome = learn_batch(storage, task(1), settings, lambda event: record_less(storage, "features"))
    assert (outcome.state, outcome.manifest.version, outcome.manifest.keep) == ("published", 2, "features")
    assert {found.sha256 for found in FeatureStore(storage)} == Samples.from_json(VersionStore(storage).samples(2)).keys


def test_features_that_are_erased_during_a_training_in_an_object_store_stay_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = memory_storage(tmp_path)
    settings = tiny_settings(keep="features", replay_size=None, keep_per_class=6, gate_accuracy=1, gate_auc=1)
    learn_batch(storage, task(0), settings, lambda event: None)
    retention, earlier = Retention(VersionStore(storage)), min(found.sha256 for found in FeatureStore(storage))
    learn_batch(storage, task(1), settings, lambda event: retention.remove(earlier, "operator") and None)
    assert earlier not in FeatureStore(storage)

    # And while the features of stored images are written.
    batch = task(2)
    ImageStore(storage).put_all(batch.read(image.sha256) for image in batch.images)
    put_all, erased = FeatureStore.put_all, set[str]()

    def erase_then_put(store: FeatureStore, images: Iterable[Any]) -> None:
        computed = list(images)
        erased.add(computed[0][0])
        retention.remove(computed[0][0], "operator")
        put_all(store, computed)

    monkeypatch.setattr(FeatureStore, "put_all", erase_then_put)
    learn_batch(storage, batch, settings, lambda event: None, images_stored=True)
    stored = {found.sha256 for found in FeatureStore(storage)}
    assert erased
    assert not erased & stored
    assert len(stored & {image.sha256 for image in batch.images}) > 1


def test_tokens_that_are_a_linear_function_of_the_pixels_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backbone, "reveals_images", True)
    with pytest.raises(KeepError, match=r"images can be computed .* set OPENWORLD_TRAIN_ADAPTED_BLOCKS=1, in a new"):
        learn(tmp_path, task(0), "features")
    assert learn(tmp_path / "all", task(0), "images").state == "published"
