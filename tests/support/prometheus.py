"""A real Prometheus for the tests, and the queries of rules and dashboards."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from service.inference.metrics import Metrics
from tests.support.paths import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
CONFIG, RULES = PROMETHEUS / "prometheus.yml", PROMETHEUS / "rules" / "openworld.rules.yml"
GRAFANA = ROOT / "deploy" / "grafana"
RUNBOOK = ROOT / "docs" / "operations.md"
BUILT_IN_METRICS = {"up", "ALERTS"}  # of Prometheus

requires_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="needs Prometheus: apt-get install -y --no-install-recommends prometheus (or, as root, make system)",
)


@dataclass
class Prometheus:
    """A running server, and when its observation began."""

    url: str
    since: float = field(default_factory=time.time)

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30, trust_env=False).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expr: str) -> float:
        ((_, value),) = [series["value"] for series in self._get("query", query=expr)["result"]]
        return float(value)

    def values(self, expr: str) -> list[float]:
        """Return all values since the start, without NaN."""
        found = self._get("query_range", query=expr, start=self.since, end=time.time(), step=1)["result"]
        return [number for series in found for _, text in series["values"] if (number := float(text)) == number]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"}

    def scraped(self) -> bool:
        targets = self._get("targets", state="active")["activeTargets"]
        return len(targets) == 2 and all(target["health"] == "up" for target in targets)


@dataclass(frozen=True)
class Query:
    """A PromQL expression of a dashboard, with Grafana's variables, and its location."""

    where: str
    expr: str

    @property
    def of_object_store(self) -> bool:
        return "openworld_store_" in self.expr

    def rendered(self, interval: str) -> str:
        """The expression as Grafana sends it with all clients selected."""
        out = self.expr.replace("$client", ".*").replace("$__rate_interval", interval).replace("$__interval", interval)
        assert "$" not in out, f"{self.where}: unknown variable in {out}"
        return out


def exported_metrics() -> set[str]:
    """The names of all series that server and trainer can export."""
    from trainer.worker.metrics import WorkerMetrics

    names = set()
    for registry in (Metrics().registry, WorkerMetrics().registry):
        for family in registry.collect():
            endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            names |= {family.name + ending for ending in endings}
    return names


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def dashboards() -> dict[str, dict[str, Any]]:
    """Dashboards by file name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> Iterator[Query]:
    """Every query of the dashboards: panels, annotations, variables."""
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield Query(f"{name}: {panel['title']} {target['refId']}", target["expr"])
        for annotation in dashboard["annotations"]["list"]:
            yield Query(f"{name}: annotation {annotation['name']}", annotation["expr"])
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                metric = re.fullmatch(r"label_values\((\w+), \w+\)", variable["definition"])
                assert metric, variable
                yield Query(f"{name}: variable {variable['name']}", metric[1])


KEYWORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}


def metrics_in(expr: str) -> set[str]:
    """The metric names in an expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|'[^']*'", " ", expr)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"\boffset\s+\S+", " ", bare)
    names = re.findall(r"(?<![\w.:])([a-zA-Z_][\w:]*)(?!\s*\(|[\w:])", bare)
    return {name for name in names if name not in KEYWORDS}


def shortened(text: str, windows: int, waits: int) -> str:
    """Divide range windows by `windows` and `for` durations by `waits`."""

    def scaled(duration: str, factor: int) -> str:
        number, unit = re.fullmatch(r"(\d+)([smhd])", duration).groups()  # type: ignore[union-attr]
        return f"{max(1, round(int(number) * {'s': 1, 'm': 60, 'h': 3600, 'd': 86400}[unit] * 1000 / factor))}ms"

    text = re.sub(r"\[(\w+)\]", lambda match: f"[{scaled(match[1], windows)}]", text)
    return re.sub(r"(?m)^(\s+for: )(\w+)$", lambda match: match[1] + scaled(match[2], waits), text)


def local_config(folder: Path, targets: dict[str, str], windows: int, waits: int) -> Path:
    """The real configuration and rules with local targets and shortened durations."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        (static,) = job["static_configs"]
        static["targets"] = [targets[target] for target in static["targets"]]
    (folder / "rules").mkdir(parents=True)
    (folder / "rules" / RULES.name).write_text(shortened(RULES.read_text(), windows, waits))
    path = folder / CONFIG.name
    path.write_text(yaml.safe_dump(config))
    return path
