"""Prometheus with the rules of deploy/prometheus, on the servers and trainers of a fleet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

from deploy.fleet.programs import Process, required_program, start_process, wait_for

PROMETHEUS = Path(__file__).parents[1] / "prometheus"
SCRAPE_SECONDS = 2


def start_prometheus(folder: Path, port: int, servers: Sequence[int], trainers: Sequence[int]) -> Process:
    """Start Prometheus on a port; it scrapes programs on other ports."""
    folder.mkdir(parents=True)
    config = folder / "prometheus.yml"
    config.write_text(configuration(servers, trainers))
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", "--log.level=warn"]
    command = [required_program("prometheus"), *options, f"--web.listen-address=127.0.0.1:{port}"]
    process = start_process(command, folder)
    wait_for("Prometheus", lambda: _is_ready(port), folder / "log", process)
    return process


def configuration(servers: Sequence[int], trainers: Sequence[int]) -> str:
    """The configuration of docker-compose.yml with other addresses."""
    text = (PROMETHEUS / "prometheus.yml").read_text()
    changes = {
        "[server:8000]": _addresses(servers),
        "[trainer:8001]": _addresses(trainers),
        "rules/*.rules.yml": str(PROMETHEUS / "rules" / "*.rules.yml"),
        "interval: 15s": f"interval: {SCRAPE_SECONDS}s",
    }
    for old, new in changes.items():
        assert old in text, f"deploy/prometheus/prometheus.yml has no {old!r}"
        text = text.replace(old, new)
    return text


def healthy_targets(port: int) -> int:
    """The number of programs that Prometheus has scraped without an error."""
    with urlopen(f"http://127.0.0.1:{port}/api/v1/targets?state=active", timeout=5) as answer:
        targets = json.load(answer)["data"]["activeTargets"]
    return sum(target["health"] == "up" for target in targets)


def _addresses(ports: Sequence[int]) -> str:
    return json.dumps([f"127.0.0.1:{port}" for port in ports])


def _is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
