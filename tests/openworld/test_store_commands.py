"""The command line on an object store: OPENWORLD_STORE takes the place of the versions and images in the folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.storage import Storage, open_storage
from models.versions.store import VersionStore
from openworld.cli import main
from tests.support.object_stores import new_bucket
from tests.support.servers import known_image, learned_folder


@pytest.fixture
def stored(tmp_path: Path, seaweedfs: int, environment: pytest.MonkeyPatch) -> Iterator[Storage]:
    """Three versions in a bucket; the local folder is empty."""
    url = new_bucket()
    assert main(["migrate", str(learned_folder(tmp_path / "source")), url]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENWORLD_STORE", url)
        patch.setenv("OPENWORLD_DATA", str(tmp_path / "machine"))
        yield open_storage(tmp_path / "tests", url)


def test_check_examines_what_is_in_the_store_and_writes_nothing(
    stored: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {found.key: found.time for found in stored.list("")}
    capsys.readouterr()
    assert main(["check"]) == 0, capsys.readouterr().out
    assert "nothing is wrong; checked: 3 versions, 0 rejected versions, 60 images" in capsys.readouterr().out
    assert {found.key: found.time for found in stored.list("")} == before
    image = next(iter(stored.list("images/")))
    stored.put(image.key, b"damaged")
    graph = next(iter(stored.list("graphs/")))
    stored.delete([graph.key])
    assert main(["check", "--json"]) == 1
    codes = {problem["code"] for problem in json.loads(capsys.readouterr().out)["problems"]}
    assert codes == {"image_damaged", "version_damaged"}


def test_versions_are_listed_activated_kept_and_pruned(stored: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["versions", "--activate", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["current"], [one["version"] for one in document["versions"]]) == (2, [1, 2, 3])
    assert document["source"].startswith("s3://")
    assert main(["versions", "--keep", "3"]) == 0
    assert main(["prune", "--dry-run", "--last", "1"]) == 0
    assert "0 bytes would be freed in s3://" in capsys.readouterr().out
    assert VersionStore(stored).current() == 2


def test_a_folder_is_not_needed_to_predict(stored: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "image.png").write_bytes(known_image("class 1"))
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "image.png"), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == "class 1"


@pytest.mark.parametrize("command", [["backup", "there"], ["restore", "there"]])
def test_backups_are_of_folders_only(stored: Storage, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main(command) == 2
    assert "openworld migrate" in capsys.readouterr().err
