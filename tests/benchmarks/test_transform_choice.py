"""The choice of the frozen feature: the recorded one is the product's, and it comes from training images only."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch

from benchmarks.accuracy import transform
from benchmarks.accuracy.data import ImageSet
from benchmarks.accuracy.streams import DEIT, LITE0
from benchmarks.accuracy.transform import FILE, Candidate, Figures, Split, candidates, choose, main
from models.network.backbone import open_backbone
from models.versions.backbone_spec import FrozenPart
from tests.support.backbones import write_random_deit

PARTS = [FrozenPart("pooled", 5), FrozenPart("last-stage", 3)]


@pytest.mark.parametrize("name", [LITE0, DEIT])
def test_the_product_computes_the_chosen_candidate(name: str, tmp_path: Path) -> None:
    weights = write_random_deit(tmp_path / "w.safetensors") if name == DEIT else None
    backbone = open_backbone(tmp_path / "data", name, weights)
    chosen = json.loads(FILE.read_text())[name]["chosen"]
    candidate = Candidate(tuple(chosen["parts"]), chosen["transform"], chosen["scaling"])
    pixels = torch.randn(2, 3, backbone.spec.preprocessing.crop, backbone.spec.preprocessing.crop)
    with torch.inference_mode():
        tokens = backbone.trunk(pixels)
        raw, feature = backbone.frozen.parts(tokens), backbone.frozen(tokens)[0]
    assert [part.name for part in backbone.spec.frozen.parts] == chosen["parts"]
    np.testing.assert_allclose(feature, candidate.feature(raw.numpy(), backbone.spec.frozen.parts), atol=1e-5)


def test_a_candidate_selects_transforms_and_scales_parts() -> None:
    raw = np.array([[4.0, 0, 0, 0, -9, 1, 2, 2]], np.float32)
    plain = Candidate(("last-stage",), "identity", "none").feature(raw, PARTS)
    np.testing.assert_allclose(plain, [[1, 2, 2]])
    signed = Candidate(("pooled",), "signed-sqrt", "none").feature(raw, PARTS)
    np.testing.assert_allclose(signed, [[2, 0, 0, 0, -3]])
    np.testing.assert_allclose(Candidate(("pooled",), "sqrt", "none").feature(raw, PARTS), [[2, 0, 0, 0, 0]])
    both = Candidate(("pooled", "last-stage"), "identity", "unit").feature(raw, PARTS)
    np.testing.assert_allclose(np.linalg.norm(both[:, :5]), 0.5**0.5)
    np.testing.assert_allclose(np.linalg.norm(both), 1)
    assert len(candidates(PARTS)) == len(set(candidates(PARTS))) == 3 * 4 * 2


def test_the_product_changes_only_for_a_clear_gain() -> None:
    product, other = candidates(PARTS)[:2]

    def figures(accuracy: float) -> Figures:
        return {score: {"accuracy": accuracy, "auc": 80.0} for score in ("mahalanobis", "cosine", "ridge")}

    def chosen(*better: float) -> Any:
        found = {str(k): [{product: figures(70.0), other: figures(70.0 + gain)}] * 2 for k, gain in enumerate(better)}
        out = choose(found, product)
        assert out["best"]["scaling"] == out["candidates"][0]["scaling"] == other.scaling
        return out["chosen"]["scaling"]

    assert chosen(0.5, 0.5) == product.scaling  # a quarter of a point in the mean of accuracy and AUC
    assert chosen(1.0, 1.0) == other.scaling
    assert chosen(4.0, 0.0) == product.scaling  # on one data set only


def test_a_split_has_training_images_and_a_limited_number_of_novel_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        def get(self, keys: list[str]) -> torch.Tensor:
            read.append(keys)
            return torch.zeros(len(keys), 1, 8)

    read: list[list[str]] = []
    images = ImageSet.made(classes=9, train=26, test=1)
    monkeypatch.setitem(transform.MOST_NOVEL, images.name, (3, 2))
    split = Split.make(Recorded(), images, (2, 2), order=0)  # type: ignore[arg-type]
    assert np.bincount(split.labels).tolist() == [20] * 4
    assert np.bincount(split.fresh_labels).tolist() == [6] * 4 + [2] * 3
    learned, fresh = read
    assert all(key.startswith("train/") for key in learned + fresh)
    assert len(set(learned + fresh)) == 80 + 30


def test_a_run_records_all_candidates_and_resumes(
    environment: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images = ImageSet.made(classes=5, train=6, test=1)
    monkeypatch.setattr(transform.ImageSet, "load", lambda path: images)
    monkeypatch.setattr(transform, "ALL_SETS", {"made": (1, 3)})
    monkeypatch.setattr(transform, "SETS", {LITE0: ("made",)})
    monkeypatch.setattr(transform, "TRANSFORMS", {"identity": transform.TRANSFORMS["identity"]})
    out = tmp_path / "transforms.json"
    command = ["--data", "none", "--cache", str(tmp_path), "--out", str(out), "--orders", "1"]
    assert main([*command, "--backbones", LITE0]) == 0
    entry = json.loads(out.read_text())[LITE0]
    assert len(entry["candidates"]) == 7 * 2
    assert {*entry} == {"date", "commit", "orders", "chosen", "best", "candidates"}
    assert {*entry["candidates"][0]["sets"]["made"]} == {"mahalanobis", "cosine", "ridge"}

    def fail(*arguments: Any) -> Figures:
        raise AssertionError("judged again")

    monkeypatch.setattr(transform, "judge", fail)
    assert main([*command, "--backbones", LITE0]) == 0
    assert json.loads(out.read_text())[LITE0] == entry
