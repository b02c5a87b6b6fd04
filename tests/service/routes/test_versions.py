"""GET /versions/{version}: the details match the files of the version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from models.inference.novelty import SUMMARIES, Novelty
from models.inference.stored_model import read_model
from models.versions.edits import Edit, publish_edit
from models.versions.store import VersionStore
from service.routes.versions import _versions as all_versions
from service.routes.versions import version_detail
from tasks.images import ImageStore
from tests.support.manifests import make_manifest
from tests.support.servers import RunningServer, known_image, learned_folder, novel_image, running_server

REPORT = {
    "task": 0,
    "classes": ["cat", "dög"],
    "images": 12,
    "accuracy_before": None,
    "accuracy_after": 0.9,
    "auc_before": None,
    "auc_after": None,
}
METRICS = {
    "accepted": True,
    "tasks": [REPORT],
    "reasons": [],
    "accuracy": 0.88,
    "novelty_auc": 0.79,
    "networks": {"closed_form": 0.31, "networks": 0.35, "error": 0.02},
    "capacity": {"bottleneck": 64, "used_mean": 0.2, "used_max": 0.3},
    "seconds": 12.5,
    "images": 24,
    "images_per_class": {"cat": 12, "dog": 12},
}
NOVELTY = {f"novelty.{field.name}": np.zeros(len(SUMMARIES)) for field in fields(Novelty)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("detail") / "robot")
    with running_server(data, threads=1) as running:
        yield running


@pytest.mark.parametrize("number", [1, 2, 3])
def test_reference_scores_and_threshold_are_those_of_the_version(server: RunningServer, number: int) -> None:
    detail = server.get(f"/versions/{number}").json()
    store = VersionStore(Path(server.log.parent / "robot"))
    loaded = store.load(number)
    model, _ = read_model(loaded)
    assert detail["reference"] == sorted(model.novelty.known.tolist())
    assert detail["simulated"] == sorted(model.novelty.simulated.tolist())
    assert detail["threshold"] == float(model.novelty.threshold[0])
    assert detail["novel_above"] == model.novelty.novel_above
    assert detail["tasks"] == loaded.manifest.tasks
    assert (detail["version"], detail["parent"]) == (number, number - 1 or None)
    assert (detail["rule"], detail["weights"]) == (model.rule.name, model.rule.weights)
    assert list(detail["novelty_weights"]) == list(SUMMARIES)
    assert list(detail["novelty_weights"].values()) == model.novelty.weights.tolist()


def test_an_image_is_novel_if_p_novel_is_above_the_published_bound(server: RunningServer) -> None:
    (listed,) = (one for one in server.get("/versions").json()["versions"] if one["state"] == "serving")
    novel_above = server.get("/versions/3").json()["novel_above"]
    assert listed["novel_above"] == novel_above
    images = [known_image(f"class {c}", n) for c in range(5) for n in range(100, 106)]
    images += [novel_image(n) for n in range(10)]
    answers = [server.post("/predict", content=image).json()["predictions"][0] for image in images]
    assert [one["novel"] for one in answers] == [one["p_novel"] > novel_above for one in answers]
    assert {one["novel"] for one in answers} == {True, False}


def test_an_unknown_version_is_not_found(server: RunningServer) -> None:
    missing = server.get("/versions/99")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert server.get("/versions/0").json()["code"] == "invalid"


def test_the_reports_of_the_gate_are_those_of_the_manifest(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    tensors = NOVELTY | {
        "novelty.known": np.array([-3.0, -2.0, -1.0, np.inf]),
        "novelty.simulated": np.array([-np.inf, -5.0, -4.0]),
        "novelty.weights": np.arange(len(SUMMARIES), dtype=np.float64),
    }
    manifest = make_manifest(metrics=METRICS, settings={"accept": 0.95, "flag": 0.8}, threshold=-2.5, novel_above=0.3)
    number = store.publish(manifest, tensors, {}).version
    detail = version_detail(store, number)
    assert [report.model_dump() for report in detail.reports] == [REPORT]
    assert detail.capacity == METRICS["capacity"]
    assert detail.networks is not None
    assert detail.networks.model_dump() == METRICS["networks"]
    assert (detail.seconds, detail.accept, detail.learned) == (12.5, 0.95, {"cat": 12, "dog": 12})
    assert (detail.reference, detail.simulated) == ([-3.0, -2.0, -1.0], [-5.0, -4.0])  # JSON has no infinity
    assert (detail.threshold, detail.novel_above, detail.flag) == (-2.5, 0.3, 0.8)
    assert (detail.accuracy, detail.novelty_auc) == (0.88, 0.79)  # of all classes, not of the tasks
    assert detail.novelty_weights == {name: float(n) for n, name in enumerate(SUMMARIES)}
    assert detail.edit is None


def test_a_renamed_version_reports_the_new_name_and_no_training(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    tensors = NOVELTY | {"novelty.known": np.array([-1.0]), "novelty.simulated": np.array([-2.0])}
    store.publish(make_manifest(metrics=METRICS), tensors, {})
    number = publish_edit(store, Edit("rename", "dög", "hound"), "operator", "alice").version
    detail = version_detail(store, number)
    assert [report.classes for report in detail.reports] == [["cat", "hound"]]
    assert (detail.seconds, detail.edit) == (None, "renamed dög to hound")


def test_advice_does_not_name_images_that_were_erased(tmp_path: Path) -> None:
    store, images = VersionStore(tmp_path), ImageStore(tmp_path)
    kept, erased = images.put(b"kept"), images.put(b"erased")
    wrong = [{"image": sha, "label": "cat", "looks_like": "dog", "share": 0.9} for sha in (kept, erased)]
    manifest = make_manifest(metrics={**METRICS, "advice": {"wrong_labels": wrong}})
    number = store.publish(manifest, NOVELTY, {}).version
    images.remove(erased)
    advice = version_detail(store, number).advice
    assert advice is not None
    assert [one.image for one in advice.wrong_labels] == [kept]


def test_a_version_made_by_an_edit_names_the_edit(tmp_path: Path) -> None:
    store = VersionStore(learned_folder(tmp_path / "robot"))
    manifest = publish_edit(store, Edit("rename", "class 0", "apple"), "operator", "anna")
    detail = version_detail(store, manifest.version)
    assert detail.edit == "renamed class 0 to apple"
    assert detail.learned == {}
    assert detail.reference == version_detail(store, 3).reference


def test_a_version_without_tensors_is_unusable_and_the_server_keeps_running(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    store = VersionStore(data)
    with running_server(data, threads=1) as server:
        store.content_path(2, "heads").unlink()
        gone = server.get("/versions/2")
        assert (gone.status_code, gone.json()["code"]) == (409, "version_unusable")
        store.content_path(1, "heads").write_bytes(b"not tensors")
        assert server.get("/versions/1").status_code == 409
        assert server.get("/versions/3").status_code == 200


def test_the_current_version_is_that_of_the_data_folder_also_on_a_server_that_has_not_loaded_it(tmp_path: Path) -> None:
    store = VersionStore(learned_folder(tmp_path / "robot"))
    behind = SimpleNamespace(model=SimpleNamespace(version=0), failure=None, since=datetime.now(UTC), store=store)
    found = all_versions(SimpleNamespace(active_version=behind, keep="images"))  # type: ignore[arg-type]
    assert (found.serving, found.current) == (0, store.current())
