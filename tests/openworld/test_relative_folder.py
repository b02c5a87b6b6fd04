"""A data folder may be named by a relative path, as `./data` is by default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from models.versions.folder_id import folder_id
from openworld.cli import main
from tests.support.kept_features import convert_tiny
from tests.support.redis_servers import RedisServer
from tests.support.servers import learned_folder

pytestmark = pytest.mark.usefixtures("restore_torch_settings")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`./data` with three versions and a queue of its own."""
    for name in ("OPENWORLD_REDIS_URL", "OPENWORLD_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    data = learned_folder(tmp_path / "data")
    folder_id(data)
    return data


@pytest.fixture
def running(data: Path) -> Iterator[RedisServer]:
    """The Redis server of the folder, as `openworld up` starts it."""
    with RedisServer(data / "redis") as server:
        assert server.socket == data / "redis" / "redis.sock"
        yield server


def test_its_running_queue_is_found(data: Path, running: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--data", "data", "--quick"]) == 0
    assert "0 tasks" in capsys.readouterr().out
    assert main(["check", "--quick"]) == 0
    assert "0 tasks" in capsys.readouterr().out
    assert main(["backup", "copy", "--data", "data"]) == 0
    assert "without tasks" not in capsys.readouterr().out


def test_its_stopped_queue_is_started(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert_tiny(data)
    with RedisServer(data / "redis"):
        pass
    assert main(["convert", "--keep", "features"]) == 0, capsys.readouterr().err
