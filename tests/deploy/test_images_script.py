"""`deploy/images.sh` with a buildah that records its calls: what is built, from what, and what the messages say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

COMMANDS = ("sh", "sed", "dirname", "mkdir", "rm", "ln", "date", "tail")
BUILDAH = """\
echo "$@" >> {calls}
case " $* " in
*" inspect "*) [ -e {folder}/base-made ] ;;
*" commit "*) : > {folder}/base-made ;;
*" from "*) echo working-container ;;
*" images "*) echo 418 MB ;;
*" bud "*) echo "step 1"; {build} ;;
esac
"""
MMDEBSTRAP = 'for last; do :; done; mkdir -p "$last/usr/bin" && echo mmdebstrap >> {calls}'


class Machine:
    """A PATH with a buildah and a mmdebstrap that record their calls."""

    def __init__(self, folder: Path, user: int = 0, build: str = ":", without: str = "") -> None:
        self.folder, self.bin, self.calls = folder, folder / "bin", folder / "calls"
        self.images = folder / "images"
        self.bin.mkdir()
        for name in COMMANDS:
            found = shutil.which(name)
            assert found is not None
            (self.bin / name).symlink_to(found)
        programs = {
            "id": f"echo {user}",
            "buildah": BUILDAH.format(calls=self.calls, folder=folder, build=build),
            "mmdebstrap": MMDEBSTRAP.format(calls=self.calls),
        }
        for name, text in programs.items():
            if name != without:
                (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
                (self.bin / name).chmod(0o755)

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", str(ROOT / "deploy" / "images.sh"), *words],
            env={"PATH": str(self.bin), "IMAGES": str(self.images), **variables},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip

    def recorded(self, word: str) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if word in line.split()]


def test_the_base_is_made_once_and_the_images_are_built_from_it_with_their_health_checks(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    done = machine.run("server", "trainer")
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [
        "built localhost/openworld-base:bookworm: 418 MB",
        "built localhost/openworld-server:local: 418 MB",
        "built localhost/openworld-trainer:local: 418 MB",
    ]
    built = machine.recorded("bud")
    assert [line.partition("--target ")[2].split()[0] for line in built] == ["server", "trainer"]
    for line in built:
        assert "--format docker" in line
        assert "--build-arg BASE=localhost/openworld-base:bookworm" in line
        assert "--build-arg ONNX_RUNTIME=onnxruntime " in line, "not the wheel with CUDA"
    machine.run("server")
    assert len(machine.recorded("mmdebstrap")) == len(machine.recorded("commit")) == 1


def test_base_tag_runtime_and_index_can_be_chosen(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    done = machine.run(
        "server", BASE="python:3.12", IMAGE_TAG="7", ONNX_RUNTIME="onnxruntime-gpu[cuda]", PIP_INDEX_URL="https://x"
    )
    assert done.stdout.startswith("built localhost/openworld-server:7: ")
    (line,) = machine.recorded("bud")
    for given in ("BASE=python:3.12", "ONNX_RUNTIME=onnxruntime-gpu[cuda]", "PIP_INDEX_URL=https://x"):
        assert f"--build-arg {given} " in line
    assert machine.recorded("mmdebstrap") == []


def test_a_build_that_fails_shows_the_end_of_its_log_and_builds_nothing_else(tmp_path: Path) -> None:
    machine = Machine(tmp_path, build="echo no such package >&2; exit 3")
    done = machine.run("server", "trainer")
    assert done.returncode == 1
    assert "no such package" in done.stderr
    assert f"see {machine.images}/server.log" in done.stderr
    assert len(machine.recorded("bud")) == 1


@pytest.mark.parametrize(
    ("words", "user", "without", "message"),
    [
        (["robot"], 0, "", 'unknown image "robot": there are server and trainer'),
        (["server"], 0, "buildah", "buildah is missing: apt-get install buildah"),
        (["server"], 0, "mmdebstrap", "mmdebstrap is missing: apt-get install mmdebstrap, or set BASE"),
        (["server"], 1000, "", "building needs root: sudo sh deploy/images.sh server"),
    ],
)
def test_what_is_missing_is_named_with_the_way_out(
    tmp_path: Path, words: list[str], user: int, without: str, message: str
) -> None:
    machine = Machine(tmp_path, user, without=without)
    done = machine.run(*words)
    assert done.returncode == 1
    assert done.stderr == f"{message}\n"
    assert machine.recorded("bud") == []


def test_help_lists_every_variable_that_the_script_reads(tmp_path: Path) -> None:
    shown = Machine(tmp_path).run("--help").stdout
    for name in ("IMAGES", "IMAGE_TAG", "ONNX_RUNTIME", "BASE", "MIRROR", "PIP_INDEX_URL", "CERTIFICATES"):
        assert f"{name} " in shown or f"{name}," in shown


def test_all_is_removed_on_request(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.run("server")
    assert machine.images.is_dir()
    assert machine.run("--remove").returncode == 0
    assert not machine.images.exists()
