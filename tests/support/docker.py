"""The Dockerfile and the compose files, parsed, and the Redis server of the latter."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from openworld.up.embedded_redis import find_binary
from tests.support.paths import ROOT
from tests.support.ports import accepts_connections, free_port
from tests.support.waiting import wait_until

COMPOSE, GPU = ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml"
PROGRAMS = {"server": "serve", "trainer": "train"}  # target of the Dockerfile -> command and extra
SECRET = "0123456789abcdef" * 3


@dataclass(frozen=True)
class Instruction:
    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """The words without options such as --from and --mount."""
        return [word for word in self.value.split() if not word.startswith("--")]

    @property
    def exec_form(self) -> list[str]:
        """The JSON array; a JSONDecodeError for the shell form."""
        found: list[str] = json.loads(re.sub(r"^((--\S+|CMD)\s+)*", "", self.value))
        return found


class Stage:
    """A build stage with the instructions that it inherits."""

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
    """Return the stages by name, and the base images by the name of their argument."""
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


def services(file: Path = COMPOSE) -> dict[str, dict[str, Any]]:
    """Return the services as the file has them, without Compose."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text())["services"]
    return found


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that change the programs."""
    excluded = ("OPENWORLD_", "PYTHON", "COMPOSE_", "GRAFANA_", "SERVER_PUBLISH", "IMAGE_TAG")
    return {name: value for name, value in os.environ.items() if not name.startswith(excluded)}


@contextmanager
def redis_of_compose(folder: Path) -> Iterator[str]:
    """Run the tests' Redis with the options of the compose file."""
    folder.mkdir(exist_ok=True)
    program, *options = services()["redis"]["command"]
    assert program == "redis-server"
    port = free_port()
    here = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--logfile", str(folder / "redis.log")]
    process = subprocess.Popen([find_binary(), *options, *here])
    try:
        wait_until(lambda: accepts_connections(port))
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(30)
