"""The images and the compose files name real things, and what they run is run here: by hand, without an engine.

What is not tested: an image is never built and a container is never started, for this needs a Docker engine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
import yaml
from pydantic import ValidationError

from openworld.cli import parser
from openworld.environment import KNOWN
from openworld.up.embedded_redis import find_binary
from service.settings import ServiceSettings
from tasks.queue import connect
from tests.support.paths import ROOT
from tests.support.servers import wait_until
from tests.support.settings import variables

COMPOSE, GPU = ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml"
ENV_EXAMPLE, DOCKERIGNORE = ROOT / ".env.example", ROOT / ".dockerignore"
PROGRAMS = {"server": "serve", "trainer": "train"}  # the target of the Dockerfile, and its command and extra
LEAVING = 10  # seconds to close what is open when every request has its answer
SECRET = "0123456789abcdef" * 3


@dataclass(frozen=True)
class Instruction:
    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """Without its options, such as --from and --mount."""
        return [word for word in self.value.split() if not word.startswith("--")]

    @property
    def exec_form(self) -> list[str]:
        """The JSON array; a JSONDecodeError for the shell form."""
        found: list[str] = json.loads(re.sub(r"^((--\S+|CMD)\s+)*", "", self.value))
        return found


class Stage:
    """One FROM with what it inherits from the stages below it."""

    def __init__(self, name: str, parent: Stage | None) -> None:
        self.name, self.parent, self.own = name, parent, list[Instruction]()

    @property
    def instructions(self) -> list[Instruction]:
        return [*(self.parent.instructions if self.parent else []), *self.own]

    def every(self, name: str) -> list[Instruction]:
        return [one for one in self.instructions if one.name == name]

    def last(self, name: str) -> Instruction:
        return self.every(name)[-1]

    @property
    def environment(self) -> dict[str, str]:
        pairs = (pair.partition("=") for one in self.every("ENV") for pair in shlex.split(one.value))
        return {name: value for name, _, value in pairs}


def dockerfile() -> tuple[dict[str, Stage], dict[str, str]]:
    """Its stages by name, and the images that they stand on by the argument's name."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n", "", "\n".join(lines))
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, value = line.partition(" ")
        if name == "FROM":
            base, _, stage = value.partition(" AS ")
            current = stages[stage] = Stage(stage, stages.get(base))
            assert base in stages or base.strip("${}") in arguments
        elif stages:
            current.own.append(Instruction(name, value.strip()))
        else:
            assert name == "ARG"
            argument, _, default = value.partition("=")
            arguments[argument] = default
    return stages, arguments


STAGES, BASES = dockerfile()


def compose(*files: Path) -> dict[str, Any]:
    """What Compose makes of the files with the secrets filled in; a skip where there is no Compose."""
    done = docker_compose(*(option for file in files for option in ("-f", str(file))), "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def docker_compose(*arguments: str, env_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which("docker") is None:
        pytest.skip("there is no docker client")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("the docker client has no compose plugin")
    environment = clean_environment()
    if env_file is None:
        environment |= {"OPENWORLD_KEYS": f"robot:predict:{SECRET}", "GRAFANA_PASSWORD": SECRET}
    command = ["docker", "compose", "--env-file", str(env_file or os.devnull), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def clean_environment() -> dict[str, str]:
    """Of whoever runs the tests, without what would change the programs."""
    ours = ("OPENWORLD_", "PYTHON", "COMPOSE_", "GRAFANA_", "SERVER_PUBLISH", "IMAGE_TAG")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def services(file: Path = COMPOSE) -> dict[str, dict[str, Any]]:
    """As they stand in the file: for what has to be looked at without Compose, too."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text())["services"]
    return found


def placeholders() -> dict[str, str]:
    lines = ENV_EXAMPLE.read_text().splitlines()
    return {name: value for name, found, value in (line.partition("=") for line in lines) if found and name[0] != "#"}


# The images


@pytest.mark.parametrize("target", PROGRAMS)
def test_an_image_runs_as_a_user_without_rights_that_owns_the_data_and_nothing_else(target: str) -> None:
    stage = STAGES[target]
    user, _, group = stage.last("USER").value.partition(":")
    assert int(user) >= 10_000, "a number: Kubernetes cannot tell from a name that it is not root"
    assert int(group) >= 10_000
    made = " ".join(one.value for one in stage.every("RUN"))
    assert f"--uid {user}" in made
    assert f"--gid {group}" in made
    data = stage.environment["OPENWORLD_DATA"]
    assert stage.last("VOLUME").value == data
    assert f"--owner=openworld --group=openworld {data}" in made
    order = [one.name for one in stage.instructions]
    assert "RUN" not in order[order.index("USER") :], "what is installed belongs to root"


@pytest.mark.parametrize(("target", "command"), PROGRAMS.items())
def test_an_image_starts_its_program_itself_and_is_checked_and_stopped(target: str, command: str) -> None:
    stage = STAGES[target]
    assert stage.last("ENTRYPOINT").exec_form == ["openworld"]
    assert stage.last("CMD").exec_form[0] == command
    assert stage.last("HEALTHCHECK").exec_form[0] == "python"
    assert stage.last("STOPSIGNAL").value == "SIGTERM"
    listening = "OPENWORLD_PORT" if target == "server" else "OPENWORLD_TRAIN_METRICS_PORT"
    assert stage.last("EXPOSE").value == stage.environment[listening]


@pytest.mark.parametrize(("target", "extra"), PROGRAMS.items())
def test_an_image_installs_an_extra_that_exists(target: str, extra: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [name for one in STAGES[target].every("RUN") for name in re.findall(r"\.whl\)\[(\w+)\]", one.value)]
    assert installed == [extra]
    assert extra in extras


def test_the_server_image_never_names_torch_or_training() -> None:
    text = " ".join(one.value for one in STAGES["server"].instructions).lower()
    assert not re.findall(r"torch|timm|train", text)


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    allowed = {line[1:] for line in DOCKERIGNORE.read_text().splitlines() if line.startswith("!")}
    assert "*" in DOCKERIGNORE.read_text().splitlines(), "everything is kept back that is not named"
    copied = set(sources(STAGES["build"]))
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
    for target in PROGRAMS:
        for one in STAGES[target].every("COPY"):
            assert one.value.startswith("--from=build /build/"), "the images get nothing but what was built"


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


def test_the_build_stage_makes_a_complete_wheel_and_the_lists_of_what_it_needs(tmp_path: Path) -> None:
    """Its RUN lines as they are, in a folder with what it copies."""
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
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=clean_environment() | {"PATH": path}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert wanted - set(archive.namelist()) == set(), "files of the packages are missing in the wheel"
    serve, train = (tmp_path / "serve.txt").read_text(), (tmp_path / "train.txt").read_text()
    assert "onnxruntime" in serve
    assert "fastapi" in serve
    assert "torch" not in serve
    assert "torch" in train


# The compose files


@pytest.mark.parametrize("files", [(COMPOSE,), (COMPOSE, GPU)], ids=["plain", "gpu"])
def test_compose_accepts_the_files(files: tuple[Path, ...]) -> None:
    found = compose(*files)["services"]
    assert set(found) == {"server", "trainer", "redis", "prometheus", "grafana"}
    assert set(found["redis"]["networks"]) == {"queue"}
    for target in PROGRAMS:
        program = found[target]
        assert program["build"]["target"] == target
        assert program["depends_on"]["redis"]["condition"] == "service_healthy"
        assert [(volume["source"], volume["target"]) for volume in program["volumes"]] == [
            ("data", STAGES[target].environment["OPENWORLD_DATA"])
        ]
        if GPU in files:
            assert program["environment"]["OPENWORLD_DEVICE"] == "cuda"
            (device,) = program["deploy"]["resources"]["reservations"]["devices"]
            assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
            assert program["image"].endswith("-gpu"), "the image without CUDA is not overwritten"


@pytest.mark.parametrize("missing", ["OPENWORLD_KEYS", "GRAFANA_PASSWORD"])
def test_compose_refuses_to_start_without_secrets(missing: str, tmp_path: Path) -> None:
    secrets = {"OPENWORLD_KEYS": f"robot:predict:{SECRET}", "GRAFANA_PASSWORD": SECRET} | {missing: ""}
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in secrets.items()))
    done = docker_compose("config", env_file=tmp_path / ".env")
    assert done.returncode != 0
    assert missing in done.stderr
    assert SECRET not in done.stderr


def test_only_the_server_can_be_reached_from_other_machines() -> None:
    published = {name: service.get("ports", []) for name, service in services().items()}
    assert published.pop("server")
    assert published["redis"] == published["trainer"] == []
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert yaml.safe_load(COMPOSE.read_text())["networks"]["queue"]["internal"] is True


def test_the_services_run_commands_of_the_command_line() -> None:
    for target, command in PROGRAMS.items():
        for given in (STAGES[target].last("CMD").exec_form, services()[target].get("command")):
            if given is not None:
                assert parser().parse_args(given).command == command


def test_the_example_says_what_is_needed_and_is_refused_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text()))
    assert wanted == set(placeholders())
    assert placeholders()["GRAFANA_PASSWORD"] == "", "Compose refuses what is empty"
    for name in [name for name in os.environ if name.startswith("OPENWORLD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENWORLD_KEYS", placeholders()["OPENWORLD_KEYS"])
    with pytest.raises(ValidationError, match="openssl rand -hex 24"):
        ServiceSettings()
    keys = placeholders()["OPENWORLD_KEYS"].split("REPLACE-ME")
    monkeypatch.setenv("OPENWORLD_KEYS", "".join(f"{key}{SECRET}{n}" for n, key in enumerate(keys[:-1])))
    held = {role for key in ServiceSettings(host="0.0.0.0").keys for role in key.roles}
    assert held == {"predict", "label", "operate"}


def test_every_setting_that_is_named_is_one() -> None:
    for file in (ROOT / "Dockerfile", COMPOSE, GPU, ENV_EXAMPLE, ROOT / "docs" / "deploy.md"):
        named = set(re.findall(r"OPENWORLD_[A-Z_]+", file.read_text()))
        assert named, file
        assert named <= KNOWN, file


def test_settings_that_the_example_offers_are_passed_on() -> None:
    offered = set(re.findall(r"^#?([A-Z_]+)=", ENV_EXAMPLE.read_text(), re.MULTILINE))
    passed = {name for target in PROGRAMS for name in services()[target]["environment"]}
    interpolated = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    assert offered <= passed | interpolated


def test_no_secret_stands_in_a_file() -> None:
    """Secrets are `${...}`; the one address that could hold a password does not."""
    for name, value in services()["server"]["environment"].items() | services()["grafana"]["environment"].items():
        if re.search("KEY|PASSWORD|SECRET|TOKEN", name):
            assert str(value).startswith("${")
    assert urlsplit(services()["server"]["environment"]["OPENWORLD_REDIS_URL"]).password is None


def test_addresses_are_those_of_services() -> None:
    for target in PROGRAMS:
        assert urlsplit(services()[target]["environment"]["OPENWORLD_REDIS_URL"]).hostname in services()
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scraped for static in job.get("static_configs", []) for target in static["targets"]}
    assert {f"{name}:{STAGES[name].last('EXPOSE').value}" for name in PROGRAMS} <= targets
    provisioned = ROOT / "deploy" / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (source,) = yaml.safe_load(provisioned.read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_folders_that_are_mounted_exist() -> None:
    mounted = [volume for service in services().values() for volume in service.get("volumes", [])]
    folders = [volume.partition(":")[0] for volume in mounted if volume.startswith(".")]
    assert len(folders) == 2
    assert all((ROOT / folder).is_dir() for folder in folders), "Docker would make an empty one that belongs to root"


def test_the_server_has_the_time_to_finish_and_goes_before_the_trainer() -> None:
    defaults = {name: field.default for name, field in ServiceSettings.model_fields.items()}
    for target in PROGRAMS:
        grace = float(services()[target]["stop_grace_period"].removesuffix("s"))
        assert grace >= defaults["drain_seconds"] + defaults["shutdown_seconds"] + LEAVING
    assert services()["server"]["cpu_shares"] > services()["trainer"]["cpu_shares"]


def test_the_gpu_images_get_the_cuda_libraries_that_onnx_runtime_names() -> None:
    for target in PROGRAMS:
        wanted = services(GPU)[target]["build"]["args"]["CUDA_LIBRARIES"]
        assert any(one.value.startswith("CUDA_LIBRARIES=") for one in STAGES[target].every("ARG"))
        package, _, extras = wanted.removesuffix("]").partition("[")
        assert f'"{package}>=' in (ROOT / "pyproject.toml").read_text()
        try:
            offered = metadata(package).get_all("Provides-Extra") or []
        except PackageNotFoundError:
            pytest.skip(f"{package} is not for this machine")
        assert set(extras.split(",")) <= set(offered)


# What the images run


class Container:
    """The nearest thing without an engine: the image's program in the image's environment, on ports of its own."""

    def __init__(self, target: str, log: Path, **settings: object) -> None:
        self._stage, self._log, self.home = STAGES[target], log, log.with_name("home")
        self.home.mkdir()
        scripts = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ["PATH"]])
        given = variables(**settings)
        # A proxy that nobody answers at: the health check must not ask it.
        proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        # Nobody guesses that this is CI: some libraries then behave better than they do elsewhere.
        outside = {name: value for name, value in clean_environment().items() if name not in ("CI", "XDG_CACHE_HOME")}
        own = {"PATH": scripts, "HOME": str(self.home)}
        self._environment = outside | self._stage.environment | given | proxy | own

    def health(self) -> int:
        """The exit code of the image's health check."""
        command = self._stage.last("HEALTHCHECK").exec_form
        return subprocess.run(
            self._found(command), env=self._environment, capture_output=True, timeout=30, check=False
        ).returncode

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [*self._stage.last("ENTRYPOINT").exec_form, *self._stage.last("CMD").exec_form]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                self._found(command), env=self._environment, cwd=self._log.parent, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def becomes_healthy(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        def healthy() -> bool:
            assert process.poll() is None, self._log.read_text()
            return self.health() == 0

        wait_until(healthy, seconds)

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.send_signal(getattr(signal, self._stage.last("STOPSIGNAL").value))
        return process.wait(45)

    def _found(self, command: list[str]) -> list[str]:
        program = shutil.which(command[0], path=self._environment["PATH"])
        assert program is not None
        return [program, *command[1:]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_server_image_s_command_is_healthy_while_it_runs_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    port = free_port()
    keys = f"robot:predict:{SECRET}"
    image = Container("server", tmp_path / "log", data=tmp_path / "data", port=port, keys=keys, drain_seconds=0.1)
    assert image.health() == 1, "Docker keeps the other codes for itself"
    with image.running() as process:
        image.becomes_healthy(process, 60)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert client.get("/versions").status_code == 401, "the keys are in force"
            assert client.get("/metrics").status_code == 200, "but Prometheus has none"
        assert image.stop(process) == 0
    assert image.health() == 1
    assert list(image.home.rglob("*")) == [], "telemetry, for one, would leave its traces here"


def test_the_server_image_refuses_to_run_without_keys(tmp_path: Path) -> None:
    image = Container("server", tmp_path / "log", data=tmp_path, port=free_port())
    with image.running() as process:
        assert process.wait(60) == 2
    assert "OPENWORLD_KEYS" in (tmp_path / "log").read_text()


def test_the_trainer_image_s_command_is_healthy_while_it_runs_and_only_then(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "data").mkdir()
    with redis_of_compose(tmp_path / "redis") as url:
        image = Container("trainer", tmp_path / "log", data=tmp_path / "data", metrics_port=free_port(), redis_url=url)
        assert image.health() == 1
        with image.running() as process:
            image.becomes_healthy(process, 120)
            assert image.stop(process) == 0
        assert image.health() == 1
    assert list(image.home.rglob("*")) == []


def test_redis_keeps_every_task_on_the_disk_before_it_answers(tmp_path: Path) -> None:
    with redis_of_compose(tmp_path) as url, closing(connect(url)) as client:
        found = client.config_get("appendonly", "appendfsync", "maxmemory-policy")
        assert found == {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


@contextmanager
def redis_of_compose(folder: Path) -> Iterator[str]:
    """The server of the tests, with the options of the compose file."""
    folder.mkdir(exist_ok=True)
    program, *options = services()["redis"]["command"]
    assert program == "redis-server"
    port = free_port()
    here = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--logfile", str(folder / "redis.log")]
    process = subprocess.Popen([find_binary(), *options, *here])
    try:
        wait_until(lambda: answers(port))
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(30)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
