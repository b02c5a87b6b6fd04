"""The Prometheus rules are valid, their alerts fire when they should, and each has a section in the runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.prometheus import (
    BUILT_IN_METRICS,
    CONFIG,
    PROMETHEUS,
    RULES,
    RUNBOOK,
    alerts,
    exported_metrics,
    metrics_in,
    recorded,
    requires_prometheus,
    rules,
    shortened,
)

RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))

ALERTS = {
    "OpenworldOodRateHigh",
    "OpenworldOodRateCollapsed",
    "OpenworldScoreDrift",
    "OpenworldQueueStalled",
    "OpenworldTrainerDown",
    "OpenworldTrainerStalled",
    "OpenworldEngineFailing",
    "OpenworldModelLoadFailing",
    "OpenworldReplicasDisagree",
    "OpenworldNoInbox",
    "OpenworldObjectStoreFailing",
    "OpenworldManyRejects",
    "OpenworldServerDown",
    "OpenworldServerNotReady",
    "OpenworldServerErrors",
}


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Prometheus


@requires_prometheus
def test_prometheus_accepts_the_configuration_and_the_rules() -> None:
    promtool("check", "config", str(CONFIG))
    promtool("check", "rules", str(RULES))


@requires_prometheus
@pytest.mark.parametrize("file", RULE_TESTS, ids=lambda file: file.stem)
def test_the_rule_tests_pass(file: Path) -> None:
    promtool("test", "rules", str(file))


def test_all_expected_alerts_exist() -> None:
    assert set(alerts()) == ALERTS


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_the_rule_tests_let_every_alert_fire_and_not_fire(name: str) -> None:
    fires = set()
    for file in RULE_TESTS:
        for case in yaml.safe_load(file.read_text())["tests"]:
            for check in case.get("alert_rule_test", []):
                if check["alertname"] == name:
                    assert case["input_series"], "a case without input proves nothing"
                    fires.add(bool(check.get("exp_alerts")))
    assert fires == {True, False}


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_has_a_duration_a_severity_and_annotations(name: str) -> None:
    rule = alerts()[name]
    assert re.fullmatch(r"[1-9]\d*m", rule["for"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert len(rule["annotations"]["summary"]) < 120


def test_alerts_and_sections_of_the_runbook_match() -> None:
    headings = re.findall(r"^### (Openworld\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK.relative_to(ROOT)}#{name.lower()}"


def test_rules_refer_to_the_configured_jobs() -> None:
    jobs = {job["job_name"] for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}
    named = set(re.findall(r'job="([^"]+)"', RULES.read_text()))
    assert named == jobs == {"openworld-server", "openworld-trainer"}


def test_the_configuration_finds_the_rules() -> None:
    (pattern,) = yaml.safe_load(CONFIG.read_text())["rule_files"]
    assert list(PROMETHEUS.glob(pattern)) == [RULES]


# Metrics


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_existing_metrics(rule: dict[str, Any]) -> None:
    found = metrics_in(rule["expr"])
    assert found
    assert found <= exported_metrics() | recorded() | BUILT_IN_METRICS


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ('sum by (job, le) (rate(a_total{b="c d"}[5m])) / on (e) group_left () f:g:h5m > 0.5', {"a_total", "f:g:h5m"}),
        ("a unless max by (version) (a offset 1m) and on (x) b == 1e3", {"a", "b"}),
        ("(sum(a) or vector(0)) / scalar(c) * 20", {"a", "c"}),
    ],
)
def test_metric_names_are_told_apart_from_labels_functions_and_numbers(expr: str, names: set[str]) -> None:
    assert metrics_in(expr) == names


def test_shortened_rules_differ_only_in_their_durations() -> None:
    text = shortened(RULES.read_text(), 60, 300)
    assert "rate(openworld_predictions_total[5000ms])" in text
    assert "for: 2000ms" in text
    assert len(yaml.safe_load(text)["groups"]) == len(yaml.safe_load(RULES.read_text())["groups"])
    assert re.sub(r"\d+(ms|[smhd])", "", text) == re.sub(r"\d+(ms|[smhd])", "", RULES.read_text())
