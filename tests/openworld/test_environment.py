"""Every command refuses an environment variable that looks like a setting and is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.errors import OpenWorldError
from openworld.cli import main
from openworld.environment import DROPPED, KNOWN, PREFIX, RECIPE, RENAMED, SETTINGS, check_environment, settings_from
from service.settings import ServiceSettings
from tests.support.paths import ROOT
from tests.support.settings import clean_environment
from trainer.learning.settings import LearnerSettings, Recipe

SECRET = "robot:predict:never-shown-in-a-message"
COMMANDS = {
    "up": ["up"],
    "serve": ["serve"],
    "train": ["train"],
    "learn": ["learn", "folder"],
    "teach": ["teach", "folder"],
    "predict": ["predict", "image.jpg"],
    "versions": ["versions"],
    "demo": ["demo"],
}
WRONG = {
    "OPENWORLD_KEY5": "OPENWORLD_KEY5 is unknown: did you mean OPENWORLD_KEY or OPENWORLD_KEYS?",
    "OPENWORLD_MEMORY": "OPENWORLD_MEMORY is now OPENWORLD_TRAIN_REPLAY_SIZE",
    "OPENWORLD_POLL_SECONDS": "OPENWORLD_POLL_SECONDS is now OPENWORLD_SERVE_POLL_SECONDS",
    "OPENWORLD_MOMENTUM": "OPENWORLD_MOMENTUM is no longer a setting: unset it (it is part of",
    "OPENWORLD_FRIDGE": "OPENWORLD_FRIDGE is unknown: unset it",
    "OPENWROLD_KEYS": "OPENWROLD_KEYS is unknown: did you mean OPENWORLD_KEYS",
    "openworld_kets": "OPENWORLD_KETS is unknown: did you mean OPENWORLD_KEYS",
}


def refusal(name: str) -> str:
    with pytest.raises(OpenWorldError) as found:
        check_environment([name])
    return str(found.value)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_wrong_name_and_does_not_show_its_value(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for known in KNOWN:
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, SECRET)
    monkeypatch.chdir(tmp_path)
    assert main(COMMANDS[command]) == 2
    out, err = capsys.readouterr()
    assert WRONG[name] in err
    assert SECRET not in out + err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["serve", "up", "train", "predict"])
def test_a_mistyped_key_setting_never_starts_a_process(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openworld", *COMMANDS[command]],
        env=clean_environment() | {"PYTHONPATH": str(ROOT), "OPENWORLD_KEY5": SECRET, "OPENWORLD_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "OPENWORLD_KEY5 is unknown: did you mean OPENWORLD_KEY or OPENWORLD_KEYS" in done.stderr
    assert "OPENWORLD_THREADS is now OPENWORLD_SERVE_THREADS (server) or OPENWORLD_TRAIN_THREADS" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_known_names_and_those_of_other_programs_are_accepted() -> None:
    check_environment([*KNOWN, *(name.lower() for name in KNOWN)])
    check_environment(["PATH", "HOME", "OPENSSL_CONF", "OPENBLAS_NUM_THREADS", "OPENWRT_ROOT", "WORLD", "FAULT", ""])


def test_variables_of_a_kubernetes_service_are_accepted() -> None:
    links = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"]
    check_environment([f"OPENWORLD_SERVER_{link}" for link in links])
    assert "OPENWORLD_SERVER_PORT is unknown" in refusal("OPENWORLD_SERVER_PORT")


@pytest.mark.parametrize("name", ["SERVE_KEYS", "SERVE_HOST", "TRAIN_DEVICE", "TRAIN_REDIS_URL", "UP_PORT"])
def test_a_shared_setting_with_a_group_prefix_is_named_without_it(name: str) -> None:
    shared = f"OPENWORLD_{name.partition('_')[2]}"
    assert f"OPENWORLD_{name} is unknown: did you mean {shared}?" in refusal(f"OPENWORLD_{name}")


def test_the_tables_of_former_names_lead_to_names_that_exist() -> None:
    former = {f"{PREFIX}{name}" for name in (*RENAMED, *DROPPED)}
    assert not former & KNOWN
    for new in RENAMED.values():
        assert f"{PREFIX}{new}".partition(" ")[0] in KNOWN
    assert {name.lower() for name in RECIPE.split()} <= Recipe.model_fields.keys()


def test_names_without_a_group_are_those_that_several_programs_share() -> None:
    plain = {
        name.removeprefix(PREFIX) for name in KNOWN if not name.startswith(("OPENWORLD_SERVE_", "OPENWORLD_TRAIN_"))
    }
    shared = "DATA STORE STORE_CACHE_BYTES HOST PORT KEYS REDIS_URL DEVICE BACKBONE BACKBONE_WEIGHTS LOG_LEVEL"
    assert plain == {*shared.split(), "LOG_FORMAT", "URL", "KEY", "UP_REDIS_SERVER", "REDIS_REPLICAS"}


# From a variable to a setting


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_wrong_value_is_told_by_the_name_of_its_variable_and_not_shown(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = kind.variables()  # type: ignore[attr-defined]
    name = next(name for name in ("port", "metrics_port", "epochs") if name in variables)
    monkeypatch.setenv(variables[name], SECRET)
    with pytest.raises(OpenWorldError, match=f"^{variables[name]}: input should be a valid integer") as found:
        settings_from(kind, {})
    assert SECRET not in str(found.value)


def test_arguments_by_field_name_take_precedence_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENWORLD_PORT", "1")
    monkeypatch.setenv("OPENWORLD_SERVE_THREADS", "1")
    assert (ServiceSettings().port, ServiceSettings().threads) == (1, 1)
    given = settings_from(ServiceSettings, {"port": 2, "threads": 3, "host": None})
    assert (given.port, given.threads, given.host) == (2, 3, "127.0.0.1")


def test_the_recipe_is_recorded_with_the_settings() -> None:
    settings = LearnerSettings(recipe=Recipe(momentum=0.5))
    assert settings.model_dump(mode="json")["recipe"]["momentum"] == 0.5


def test_names_are_known_where_neither_torch_nor_a_web_server_is_installed() -> None:
    blocked = ["torch", "torchvision", "timm", "fastapi", "starlette", "uvicorn", "onnxruntime"]
    code = f"import sys; sys.modules.update(dict.fromkeys({json.dumps(blocked)})); import openworld.environment"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
