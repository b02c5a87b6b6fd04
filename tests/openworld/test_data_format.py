"""Every command that opens a data folder refuses one of a newer or unknown format, and changes nothing in it."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import httpx2 as httpx
import pytest

from models.versions.data_format import FORMAT
from tests.support.images import make_image, write_classes
from tests.support.servers import address_of, known_image, learned_folder, novel_image, running_server, wait_until
from tests.support.settings import clean_environment

COMMANDS = {
    "learn": ["learn", "batch"],
    "predict": ["predict", "image.png"],
    "versions": ["versions"],
    "versions --activate": ["versions", "--activate", "1"],
    "prune": ["prune"],
    "serve": ["serve", "--port", "0"],
    "train": ["train", "--redis-url", "redis://127.0.0.1:1"],
    "up": ["up", "--port", "0"],
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openworld", *arguments, "--data", "data"]
    return subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the commands, with a batch and an image."""
    folder = tmp_path_factory.mktemp("inputs")
    write_classes(folder / "batch", {"cat": [make_image(1), make_image(2)], "dog": [make_image(3), make_image(4)]})
    (folder / "image.png").write_bytes(known_image("class 0"))
    learned_folder(folder / "data")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("4\n", "error: the data folder data has format 4, newer than 3, the newest that this openworld supports"),
        ("soup", "FORMAT holds 'soup', not a format number: restore it from a backup"),
    ],
)
def test_a_newer_or_damaged_format_is_refused(inputs: Path, command: str, content: str, message: str) -> None:
    marker = inputs / "data" / "FORMAT"
    marker.write_text(content)
    before = sorted(str(path) for path in inputs.rglob("*"))
    done = run(inputs, *COMMANDS[command])
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.replace(f"{inputs}/", "")
    assert "Traceback" not in done.stderr
    assert marker.read_text() == content
    assert sorted(str(path) for path in inputs.rglob("*")) == before


def test_a_server_migrates_a_folder_of_format_1_and_starts_without_versions(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "data")
    (data / "FORMAT").unlink()
    with running_server(data) as server:
        assert (data / "FORMAT").read_text() == f"{FORMAT}\n"
        assert server.get("/versions").json()["serving"] == 0
        assert server.post("/predict", content=known_image("class 0")).json()["predictions"][0]["novel"]
        assert "must be taught again" in server.log.read_text()
    assert (data / "format-1" / "versions" / "000003.json").is_file()


def test_a_server_creates_a_missing_folder_with_its_first_write(tmp_path: Path) -> None:
    data = tmp_path / "missing"
    with running_server(data) as server:
        assert server.get("/versions").json()["serving"] == 0
        assert not data.exists()
        assert server.post("/predict", content=novel_image(1)).status_code == 200
        wait_until((data / "inbox" / "inbox.sqlite3").exists)
        assert (data / "FORMAT").read_text() == f"{FORMAT}\n"


# Root may write to any folder unless it gives up this capability.
UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []


@pytest.mark.skipif(os.geteuid() == 0 and which("setpriv") is None, reason="root without setpriv may write anywhere")
def test_a_read_only_folder_is_served(tmp_path: Path) -> None:
    data, log = learned_folder(tmp_path / "data"), tmp_path / "log"
    data.chmod(0o555)
    command = [*UNPRIVILEGED, sys.executable, "-m", "openworld", "serve", "--port", "0", "--data", str(data)]
    environment = clean_environment() | {"OPENWORLD_LOG_FORMAT": "json"}
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        try:
            url = address_of(process, log)
            assert httpx.get(f"{url}/versions", timeout=30).json()["serving"] == 3
            image = known_image("class 0")
            answer = httpx.post(f"{url}/predict", content=image, headers={"Content-Type": "image/png"}, timeout=30)
            assert answer.status_code == 200
        finally:
            process.terminate()
            data.chmod(0o755)
