"""A data folder that keeps statistics has nothing of an image but its hash, also not its features."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from models.errors import CorruptVersion, KeepError
from models.files import sha256_bytes
from models.versions.keep import record_less, recorded_keep
from models.versions.pruning import mark_kept, unmark_kept
from models.versions.store import VersionStore
from openworld.check import check_folder
from openworld.cli import main
from tasks.errors import BatchError
from tasks.images import FeatureStore, ImageStore, cache_files, erased_images
from tests.support.kept_features import (
    cnn_folder,
    convert_tiny,
    convert_until_killed,
    feature_vectors,
    learn_tiny,
    places_of,
)
from tests.support.servers import IMAGES
from tests.support.tiny_model import class_tasks
from trainer import conversion
from trainer.learning import gate
from trainer.learning.memory import Samples
from trainer.learning.methods import METHODS
from trainer.learning.settings import REPLAYING_METHODS

pytestmark = pytest.mark.usefixtures("restore_torch_settings")

FOUR = class_tasks([2, 2], images=12)
NEXT = class_tasks([2, 2, 2], images=12)[2]


def images_of(*tasks: dict[str, list[str]]) -> list[bytes]:
    return [IMAGES.read(key) for task in tasks for keys in task.values() for key in keys]


def test_neither_images_nor_features_remain_and_every_version_says_so(tmp_path: Path) -> None:
    data = cnn_folder(tmp_path, "statistics")
    assert learn_tiny(data, NEXT).state == "published"
    images = images_of(*FOUR, NEXT)
    assert places_of([*images, *feature_vectors(data, images)], data) == []
    assert (list(FeatureStore(data)), list(ImageStore(data)), list(cache_files(data))) == ([], [], [])
    store = VersionStore(data)
    for version in (1, 2, 3):
        manifest, samples = store.manifest(version), Samples.from_json(store.samples(version))
        assert manifest.keep == "statistics"
        assert (samples.keys, bool(manifest.metrics["drawn"])) == (set(), version > 1)
    seen = {key for keys in samples.seen.values() for key in keys}
    assert seen == {sha256_bytes(data) for data in images}  # so that no image counts twice
    assert check_folder(data, None).problems == []


def test_a_task_gives_the_same_version_again(tmp_path: Path) -> None:
    files = []
    for name in ("one", "other"):
        data = cnn_folder(tmp_path / name, "statistics")
        files.append(learn_tiny(data, NEXT).manifest.files)
    assert files[0] == files[1]


@pytest.mark.parametrize("step", [None, "record_less", "_publish", "discard_sums", "discard_images"])
def test_a_conversion_discards_features_and_is_completed_after_a_kill(tmp_path: Path, step: str | None) -> None:
    data = cnn_folder(tmp_path, "features")
    images = images_of(*FOUR)
    vectors = feature_vectors(data, images)
    assert places_of(vectors, data)  # the search finds features where they are kept
    if step is not None:
        convert_until_killed(data, step, "statistics")
    convert_tiny(data, keep="statistics")
    assert places_of(vectors, data) == []
    assert erased_images(data, with_features=True)  # other machines remove their copies
    assert check_folder(data, None).problems == []
    assert learn_tiny(data, NEXT).manifest.keep == "statistics"
    assert learn_tiny(data, NEXT).state == "already learned"
    assert learn_tiny(data, FOUR[0]).state == "already learned"  # what was learned before the conversion stays known
    with pytest.raises(CorruptVersion, match="version 1 cannot be used any more"):
        VersionStore(data).activate(1, "operator", "for a test")


def stored_contents(data: Path) -> set[str]:
    return {path.name for name in ("tasks", "heads", "samples") for path in (data / name).iterdir()}


def needed_contents(data: Path, *versions: int) -> set[str]:
    store = VersionStore(data)
    return {store.content_path(n, role).name for n in versions for role in store.manifest(n).files}


def test_a_conversion_removes_the_sums_of_earlier_versions_and_rejected_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = cnn_folder(tmp_path, "features")
    extended = {"class 0": ["class 0/90"]}  # one image: the sums of versions 2 and 3 reveal its feature
    assert learn_tiny(data, extended).manifest.version == 3
    with monkeypatch.context() as patch:
        patch.setattr(gate, "_reasons", lambda *arguments: ["a reason"])
        assert learn_tiny(data, NEXT).state == "rejected"
    mark_kept(VersionStore(data), 2)
    assert main(["convert", "--keep", "statistics", "--data", str(data)]) == 2
    assert "release them first with `openworld versions --release N` (2)" in capsys.readouterr().err
    assert recorded_keep(data) == "features"
    unmark_kept(VersionStore(data), 2)
    assert main(["convert", "--keep", "statistics", "--data", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "contents of earlier versions and rejected results removed" in shown
    assert "it is not possible any more to roll back to version 1, 2, 3" in shown
    assert VersionStore(data).current() == 4
    assert stored_contents(data) == needed_contents(data, 4)
    assert check_folder(data, None).problems == []


def test_a_folder_is_converted_from_images_but_not_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = cnn_folder(tmp_path, "images")
    images = images_of(*FOUR)
    assert main(["convert", "--keep", "statistics", "--data", str(data)]) == 0
    assert f"keeps statistics; {len(images)} images discarded" in capsys.readouterr().out
    assert places_of([*images, *feature_vectors(data, images)], data) == []
    assert main(["convert", "--keep", "features", "--data", str(data)]) == 2
    assert "keeps statistics, and what it does not keep cannot be recovered" in capsys.readouterr().err


def test_a_folder_with_sums_over_two_images_is_not_converted(tmp_path: Path) -> None:
    data = cnn_folder(tmp_path, "features")
    learn_tiny(data, {"pair": ["pair/0", "pair/1"]})
    with pytest.raises(KeepError, match=r"1 classes have fewer than 5 images \(pair\).* teach more images of these"):
        convert_tiny(data, keep="statistics")
    assert recorded_keep(data) == "features"


def test_a_folder_with_a_pending_class_of_one_image_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, named = cnn_folder(tmp_path, "features"), conversion.samples_by_name
    pending = {"pending": {"task": {"lonely": ["0" * 64]}}}
    monkeypatch.setattr(conversion, "samples_by_name", lambda *arguments: {**named(*arguments), **pending})
    with pytest.raises(KeepError, match=r"1 classes have fewer than 5 images \(lonely\)"):
        convert_tiny(data, keep="statistics")


def test_a_correction_that_leaves_a_class_with_few_images_is_refused(tmp_path: Path) -> None:
    data = cnn_folder(tmp_path, "statistics")
    with pytest.raises(BatchError, match="'class 0' is left with 3 of at least 5 images"):
        learn_tiny(data, {"other": FOUR[0]["class 0"][:9]})


def test_a_backup_has_no_features_that_an_interrupted_conversion_left(tmp_path: Path) -> None:
    data = cnn_folder(tmp_path, "features")
    record_less(data, "statistics")  # killed here
    assert main(["backup", str(tmp_path / "copy"), "--data", str(data)]) == 0
    assert list(FeatureStore(data))
    vectors = feature_vectors(data, images_of(*FOUR))
    assert places_of(vectors, tmp_path / "copy") == []


def test_a_method_that_replays_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    for method in (None, "more"):
        with pytest.raises(KeepError, match=r"replays features of earlier images.* to hat-csi or sup-csi in a new"):
            learn_tiny(tmp_path, FOUR[0], keep="statistics", method=method)
    assert recorded_keep(tmp_path) == "images"
    assert {name for name, method in METHODS.items() if method.replays} == set(REPLAYING_METHODS)


@pytest.mark.parametrize("provisional", [False, True])
def test_a_rejected_batch_leaves_neither_its_images_nor_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provisional: bool
) -> None:
    data = cnn_folder(tmp_path, "statistics")
    monkeypatch.setattr(gate, "_reasons", lambda *arguments: ["a reason"])
    assert learn_tiny(data, NEXT, provisional).state == "rejected"
    current = VersionStore(data).current_manifest()
    assert current is not None
    # Its classes answered before it was rejected: later versions could not have them, without images or features.
    assert current.version == (4 if provisional else 2)
    assert current.classes == [name for task in FOUR for name in task]
    images = images_of(NEXT)
    assert places_of([*images, *feature_vectors(data, images)], data) == []
    # Nor do its sums remain: those of the same images except one would reveal this image.
    assert stored_contents(data) == needed_contents(data, *([1, 2, 4] if provisional else [1, 2]))
    assert check_folder(data, None).problems == []
