"""The images as the Dockerfile describes them. `test_built_images.py` tests those that were built."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.docker import BASES, COMPOSE, GPU, PROGRAMS, STAGES, Stage, clean_environment, services
from tests.support.fresh_venv import PACKAGES
from tests.support.paths import ROOT

DOCKERIGNORE = ROOT / ".dockerignore"
NOT_IN_SERVER = {"network", "client"}  # packages that need extras of their own


@pytest.mark.parametrize("target", PROGRAMS)
def test_an_image_runs_as_an_unprivileged_user_that_owns_only_the_data(target: str) -> None:
    stage = STAGES[target]
    user, _, group = stage.last("USER").value.partition(":")
    assert int(user) >= 10_000, "must be a number: Kubernetes cannot tell from a name that it is not root"
    assert int(group) >= 10_000
    commands = " ".join(one.value for one in stage.every("RUN"))
    assert f"--uid {user}" in commands
    assert f"--gid {group}" in commands
    data = stage.environment["OPENWORLD_DATA"]
    assert stage.last("VOLUME").value == data
    assert f"--owner=openworld --group=openworld {data}" in commands
    order = [one.name for one in stage.instructions]
    assert "RUN" not in order[order.index("USER") :], "installed files belong to root"


@pytest.mark.parametrize(("target", "command"), PROGRAMS.items())
def test_an_image_has_entrypoint_command_health_check_and_stop_signal(target: str, command: str) -> None:
    stage = STAGES[target]
    assert stage.last("ENTRYPOINT").exec_form == ["openworld"]
    assert stage.last("CMD").exec_form[0] == command
    assert stage.last("HEALTHCHECK").exec_form[0] == "python"
    assert stage.last("STOPSIGNAL").value == "SIGTERM"
    port = "OPENWORLD_PORT" if target == "server" else "OPENWORLD_TRAIN_METRICS_PORT"
    assert stage.last("EXPOSE").value == stage.environment[port]


@pytest.mark.parametrize(("target", "extra"), PROGRAMS.items())
def test_an_image_installs_the_requirements_of_its_program_and_the_wheel_without_others(
    target: str, extra: str
) -> None:
    copied = [one.value for one in STAGES[target].every("COPY")]
    assert copied == [f"--from=build /build/{extra}.txt /opt/openworld/requirements.txt"]
    installed = [one.value for one in STAGES[target].every("RUN") if "pip install" in one.value]
    assert "-r /opt/openworld/requirements.txt" in installed[0]
    assert "--no-deps /wheels/*.whl && pip check" in installed[1], "with dependencies: a second ONNX Runtime"


@pytest.mark.parametrize(
    ("extra", "packages"), [("serve", ("models", "tasks", "service")), ("train", ("models", "tasks", "trainer"))]
)
def test_a_program_imports_only_what_its_image_installs(extra: str, packages: tuple[str, ...]) -> None:
    installed = with_dependencies(requirements_of(extra))
    places = packages_distributions()
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if not NOT_IN_SERVER & set(path.parts) or extra == "train"
        for name in imported(path) - set(sys.stdlib_module_names) - {*PACKAGES, "__future__"}
        if not {normal(one) for one in places.get(name, [name])} & installed
    }
    assert missing == set()


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def requirements_of(extra: str) -> set[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = ["pydantic", *extras["inference"], *extras["scale"], *extras[extra]]
    return {normal(Requirement(line).name) for line in lines} - {"openworld"}


def with_dependencies(names: set[str]) -> set[str]:
    found: set[str] = set()
    while names:
        found |= names
        lines = [line for name in names if (known := find_distribution(name)) for line in known.requires or []]
        needed = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""})]
        names = {normal(one.name) for one in needed} - found
    return found


def find_distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:  # for another platform
        return None


def imported(path: Path) -> set[str]:
    """The first words of all absolute imports, also of those inside functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def test_the_server_image_never_mentions_torch_or_training() -> None:
    text = " ".join(one.value for one in STAGES["server"].instructions).lower()
    assert not re.findall(r"torch|timm|train", text)


def test_copied_files_exist_and_are_not_ignored() -> None:
    allowed = {line[1:] for line in DOCKERIGNORE.read_text().splitlines() if line.startswith("!")}
    assert "*" in DOCKERIGNORE.read_text().splitlines(), "ignores everything that is not listed"
    copied = set(sources(STAGES["build"]))
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
    for target in PROGRAMS:
        for one in STAGES[target].every("COPY"):
            assert one.value.startswith("--from=build /build/"), "the images get only files that were built"


def sources(stage: Stage) -> list[str]:
    return [source for one in stage.every("COPY") for source in one.words[:-1]]


def test_every_image_has_a_fixed_tag() -> None:
    images = [*BASES.values(), *(service["image"] for file in (COMPOSE, GPU) for service in services(file).values())]
    assert len(images) == 8
    for image in images:
        _, _, tag = image.partition(":")
        assert tag, f"{image} has no tag"
        assert "latest" not in tag
    assert BASES["BASE"].startswith("python:3.11-slim")


def test_the_build_stage_makes_a_complete_wheel_and_the_lists_of_requirements(tmp_path: Path) -> None:
    """Runs the RUN lines of the stage in a folder with the files that it copies."""
    for source in sources(STAGES["build"]):
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, tmp_path)
    packages = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    wanted = {str(file.relative_to(tmp_path)) for one in packages for file in one.rglob("*") if file.is_file()}
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    for one in STAGES["build"].every("RUN"):
        command = re.sub(r"^(--mount=\S+\s+)*", "", one.value)
        environment = clean_environment() | {"PATH": path, "ONNX_RUNTIME": "onnxruntime"}
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert wanted - set(archive.namelist()) == set(), "files of the packages are missing in the wheel"
    serve, train = (tmp_path / "serve.txt").read_text(), (tmp_path / "train.txt").read_text()
    assert "fastapi" in serve
    assert "torch" not in serve
    assert "torch" in train
    for text in (serve, train):
        assert [line for line in text.splitlines() if line.startswith("onnxruntime")] == ["onnxruntime>=1.22,<2"]
