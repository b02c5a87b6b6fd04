"""The compose files and .env.example. No container is started: that needs a Docker engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from pydantic import ValidationError

from openworld.cli import parser
from openworld.environment import KNOWN
from service.settings import ServiceSettings
from tests.support.docker import COMPOSE, GPU, PROGRAMS, SECRET, STAGES, clean_environment, services
from tests.support.paths import ROOT

ENV_EXAMPLE = ROOT / ".env.example"
CLOSE_SECONDS = 10  # to close connections after the last answer


def compose(*files: Path) -> dict[str, Any]:
    """Return the configuration that Compose reads from the files, with secrets; skip without Compose."""
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


def example() -> dict[str, str]:
    lines = ENV_EXAMPLE.read_text().splitlines()
    return {name: value for name, found, value in (line.partition("=") for line in lines) if found and name[0] != "#"}


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
            assert program["image"].endswith("-gpu"), "must not overwrite the image without CUDA"


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


def test_the_services_run_existing_commands() -> None:
    for target, command in PROGRAMS.items():
        for given in (STAGES[target].last("CMD").exec_form, services()[target].get("command")):
            if given is not None:
                assert parser().parse_args(given).command == command


def test_the_example_lists_the_required_variables_and_is_refused_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = set(re.findall(r"\$\{(\w+):\?", COMPOSE.read_text()))
    assert wanted == set(example())
    assert example()["GRAFANA_PASSWORD"] == "", "Compose refuses an empty value"
    for name in [name for name in os.environ if name.startswith("OPENWORLD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENWORLD_KEYS", example()["OPENWORLD_KEYS"])
    with pytest.raises(ValidationError, match="openssl rand -hex 24"):
        ServiceSettings()
    keys = example()["OPENWORLD_KEYS"].split("REPLACE-ME")
    monkeypatch.setenv("OPENWORLD_KEYS", "".join(f"{key}{SECRET}{n}" for n, key in enumerate(keys[:-1])))
    held = {role for key in ServiceSettings(host="0.0.0.0").keys for role in key.roles}
    assert held == {"predict", "label", "operate"}


def test_every_variable_that_is_mentioned_exists() -> None:
    for file in (ROOT / "Dockerfile", COMPOSE, GPU, ENV_EXAMPLE, ROOT / "docs" / "deploy.md"):
        named = set(re.findall(r"OPENWORLD_[A-Z_]+", file.read_text()))
        assert named, file
        assert named <= KNOWN, file


def test_variables_of_the_example_reach_the_services() -> None:
    offered = set(re.findall(r"^#?([A-Z_]+)=", ENV_EXAMPLE.read_text(), re.MULTILINE))
    passed = {name for target in PROGRAMS for name in services()[target]["environment"]}
    interpolated = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    assert offered <= passed | interpolated


def test_no_file_contains_a_secret() -> None:
    """Secrets are `${...}`, and the Redis URL has no password."""
    for name, value in services()["server"]["environment"].items() | services()["grafana"]["environment"].items():
        if re.search("KEY|PASSWORD|SECRET|TOKEN", name):
            assert str(value).startswith("${")
    assert urlsplit(services()["server"]["environment"]["OPENWORLD_REDIS_URL"]).password is None


def test_addresses_name_services() -> None:
    for target in PROGRAMS:
        assert urlsplit(services()[target]["environment"]["OPENWORLD_REDIS_URL"]).hostname in services()
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scraped for static in job.get("static_configs", []) for target in static["targets"]}
    assert {f"{name}:{STAGES[name].last('EXPOSE').value}" for name in PROGRAMS} <= targets
    provisioned = ROOT / "deploy" / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (source,) = yaml.safe_load(provisioned.read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_mounted_folders_exist() -> None:
    mounted = [volume for service in services().values() for volume in service.get("volumes", [])]
    folders = [volume.partition(":")[0] for volume in mounted if volume.startswith(".")]
    assert len(folders) == 2
    assert all((ROOT / folder).is_dir() for folder in folders), "Docker would create one that belongs to root"


def test_the_programs_have_time_to_stop_and_the_server_has_priority() -> None:
    defaults = {name: field.default for name, field in ServiceSettings.model_fields.items()}
    for target in PROGRAMS:
        grace = float(services()[target]["stop_grace_period"].removesuffix("s"))
        assert grace >= defaults["drain_seconds"] + defaults["shutdown_seconds"] + CLOSE_SECONDS
    assert services()["server"]["cpu_shares"] > services()["trainer"]["cpu_shares"]


def test_the_gpu_images_install_the_cuda_extras_of_onnx_runtime_and_the_others_the_cpu_wheel() -> None:
    assert "ONNX_RUNTIME=onnxruntime" in [one.value for one in STAGES["build"].every("ARG")]
    for target in PROGRAMS:
        wanted = services(GPU)[target]["build"]["args"]["ONNX_RUNTIME"]
        package, _, extras = wanted.removesuffix("]").partition("[")
        assert f'"{package}>=' in (ROOT / "pyproject.toml").read_text()
        try:
            offered = metadata(package).get_all("Provides-Extra") or []
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed on this platform")
        assert set(extras.split(",")) <= set(offered)
