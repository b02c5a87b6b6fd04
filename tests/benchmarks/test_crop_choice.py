"""How much of an image the backbone sees: the product's share is the better one of the record."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from benchmarks.accuracy import crop
from benchmarks.accuracy.crop import FILE, SHARES, main, with_share
from benchmarks.accuracy.data import ImageSet, recorded_now
from benchmarks.accuracy.streams import LITE0


def test_the_product_shows_the_best_share_of_the_record(tmp_path: Path) -> None:
    shares = json.loads(FILE.read_text())[LITE0]["shares"]
    best = max(shares, key=lambda share: shares[share]["mean"])
    backbone = recorded_now(tmp_path, LITE0)
    assert with_share(backbone, float(best)).spec == backbone.spec
    assert recorded_now(tmp_path, LITE0).spec == backbone.spec  # from its record


def test_a_run_records_accuracy_and_auc_of_every_share(
    environment: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images = ImageSet.made(classes=5, train=6, test=1)
    monkeypatch.setattr(crop.ImageSet, "load", lambda path: images)
    monkeypatch.setattr(crop, "ALL_SETS", {"made": (1, 3)})
    out = tmp_path / "crops.json"
    command = ["--data", "none", "--cache", str(tmp_path), "--out", str(out), "--orders", "1", "--sets", "made"]
    assert main(command) == 0
    shares = json.loads(out.read_text())[LITE0]["shares"]
    assert [float(share) for share in shares] == list(SHARES)
    for entry in shares.values():
        figures = entry["sets"]["made"]
        assert {*figures} == {"accuracy", "auc"}
        assert entry["mean"] == pytest.approx(sum(figures.values()) / 2, abs=0.02)
