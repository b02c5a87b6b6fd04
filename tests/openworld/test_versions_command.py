"""`openworld versions` of a data folder and of a running service."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.versions.store import VersionStore
from tests.support.coloured_images import tree

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("environment")

Run = Any


@pytest.fixture
def two_versions(data: Path) -> Path:
    """As after a second task, which here has learned nothing."""
    store = VersionStore(data)
    one = store.load(1)
    manifest = one.manifest.model_copy(update={"parent": 1, "task_id": "second"})
    assert store.publish(manifest, one.tensors, one.samples).version == 2
    return data


def test_an_operator_rolls_back_and_forward_from_the_command_line(
    two_versions: Path, batches: SimpleNamespace, run: Run
) -> None:
    code, out, _ = run("versions", "--data", two_versions, "--activate", "1")
    assert code == 0
    assert re.search(r"current │ +1 │", out)
    store = VersionStore(two_versions)
    assert store.current() == 1
    assert [(line.version, line.by) for line in store.log()] == [(1, "trainer"), (2, "trainer"), (1, "operator")]
    assert json.loads(run("versions", "--data", two_versions, "--activate", "2", "--json")[1])["current"] == 2
    assert store.current() == 2
    code, out, _ = run("learn", batches.first, "--data", two_versions)
    assert code == 0
    assert "already learned as version 1 (version 2 is current: openworld versions --activate 1)" in " ".join(
        out.split()
    )


@pytest.mark.parametrize("number", ["9", "0", "-1"])
def test_rolling_back_to_a_version_that_is_not_there_changes_nothing(
    two_versions: Path, tmp_path: Path, run: Run, number: str
) -> None:
    before = tree(two_versions)
    code, out, err = run("versions", "--data", two_versions, f"--activate={number}")
    assert (code, out) == (2, "")
    assert f"there is no version {number}" in err
    assert tree(two_versions) == before
    assert run("versions", "--data", tmp_path / "nothing", "--activate", "1")[0] == 2
    assert not (tmp_path / "nothing").exists()


def test_a_damaged_version_is_not_rolled_back_to_and_a_damaged_current_is_repaired(
    two_versions: Path, run: Run
) -> None:
    (two_versions / "versions/000002/samples.json").write_text("{}")
    (two_versions / "CURRENT").write_text("?")
    code, _, err = run("versions", "--data", two_versions, "--activate", "2")
    assert code == 2
    assert "samples.json" in err
    code, _, err = run("versions", "--data", two_versions)
    assert code == 2
    assert "openworld versions --activate N" in err
    assert run("versions", "--data", two_versions, "--activate", "1")[0] == 0
    assert VersionStore(two_versions).current() == 1
