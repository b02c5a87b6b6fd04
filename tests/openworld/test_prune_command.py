"""`openworld prune` and `openworld versions --keep`: what an operator sees, and a server that keeps answering."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from models.versions.pruning import YOUNG_SECONDS
from models.versions.store import VersionStore
from openworld.check import check_folder
from tests.support.servers import known_image, learned_folder, running_server

Run = Any


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """Version 4 is current, with version 1 as its parent; versions 2 and 3 were rolled back."""
    data = learned_folder(tmp_path / "robot", current=1)
    store = VersionStore(data)
    manifest = store.manifest(1).model_copy(update={"parent": 1, "task_id": "other"})
    store.publish_edit(manifest, "operator", "another branch")
    for path in data.rglob("*"):
        os.utime(path, (time.time() - 2 * YOUNG_SECONDS,) * 2)
    return data


def test_a_marked_version_is_kept_until_it_is_released(run: Run, branched: Path) -> None:
    store = VersionStore(branched)
    code, out, _ = run("versions", "--data", branched, "--keep", "2")
    assert code == 0
    assert "kept" in out
    code, out, _ = run("prune", "--data", branched, "--last", "1", "--dry-run")
    assert code == 0
    assert "1 version: 3" in out
    assert "kB would be freed in" in out
    assert store.versions() == [1, 2, 3, 4]
    document = json.loads(run("prune", "--data", branched, "--last", "1", "--json")[1])
    assert (document["versions"], document["dry_run"]) == ([3], False)
    run("versions", "--data", branched, "--release", "2")
    assert json.loads(run("prune", "--data", branched, "--last", "1", "--json")[1])["versions"] == [2]
    assert store.versions() == [1, 4]


def test_pruning_beside_a_running_server_leaves_a_sound_folder(run: Run, branched: Path) -> None:
    with running_server(branched, threads=1) as server:
        code, out, _ = run("prune", "--data", branched, "--last", "1")
        assert code == 0
        assert "2 versions: 2, 3" in out
        assert server.post("/predict", content=known_image("class 0")).json()["predictions"][0]["version"] == 4
        assert server.get("/versions/3").status_code == 404
        disk = server.get("/versions").json()["disk"]
        assert disk["tasks"] == sum(path.stat().st_size for path in (branched / "tasks").iterdir())
        assert disk["images"] > 0
        assert run("versions", "--url", server.url, "--activate", "1")[0] == 0
    report = check_folder(branched, None)
    assert report.ok, report.problems


@pytest.mark.parametrize("arguments", [["prune", "--last", "0"], ["versions", "--keep", "9"]])
def test_a_wrong_number_is_refused(run: Run, branched: Path, arguments: list[str]) -> None:
    code, _, err = run(*arguments, "--data", branched)
    assert code == 2
    assert "at least 1" in err or "there is no version 9" in err


def test_a_folder_that_does_not_exist_is_not_created(run: Run, tmp_path: Path) -> None:
    code, _, err = run("prune", "--data", tmp_path / "nothing")
    assert code == 2
    assert "there is no data folder" in err
    assert not (tmp_path / "nothing").exists()
