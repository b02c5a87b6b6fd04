"""Rules, dashboards and runbooks name things that exist, and every alert fires when it should and only then."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.inference.metrics import Metrics
from tests.support.paths import ROOT
from tests.support.prometheus import (
    CONFIG,
    GRAFANA,
    PROMETHEUS,
    RULES,
    alerts,
    dashboards,
    metrics_in,
    panels,
    queries,
    recorded,
    requires_prometheus,
    rules,
    shortened,
)

RULE_TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
RUNBOOK = ROOT / "docs" / "operations.md"
OF_PROMETHEUS = {"up", "ALERTS"}

# What the design asks for, and two more: a server that is there and not ready, and one that answers with errors.
DESIGNED = {
    "OpenworldOodRateHigh",
    "OpenworldOodRateCollapsed",
    "OpenworldScoreDrift",
    "OpenworldQueueStalled",
    "OpenworldTrainerDown",
    "OpenworldModelLoadFailing",
    "OpenworldReplicasDisagree",
    "OpenworldManyRejects",
    "OpenworldServerDown",
    "OpenworldServerNotReady",
    "OpenworldServerErrors",
}


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def exported() -> set[str]:
    """The names of all series that the two programs can have."""
    from trainer.worker.metrics import WorkerMetrics  # it needs no torch, but its package is the trainer's

    names = set()
    for registry in (Metrics().registry, WorkerMetrics().registry):
        for family in registry.collect():
            endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            names |= {family.name + ending for ending in endings}
    return names


# Prometheus


@requires_prometheus
def test_prometheus_accepts_the_configuration_and_the_rules() -> None:
    promtool("check", "config", str(CONFIG))
    promtool("check", "rules", str(RULES))


@requires_prometheus
@pytest.mark.parametrize("file", RULE_TESTS, ids=lambda file: file.stem)
def test_rules_do_what_their_tests_say(file: Path) -> None:
    promtool("test", "rules", str(file))


def test_the_alerts_of_the_design_are_there() -> None:
    assert set(alerts()) == DESIGNED


@pytest.mark.parametrize("name", sorted(DESIGNED))
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str) -> None:
    fires = set()
    for file in RULE_TESTS:
        for case in yaml.safe_load(file.read_text())["tests"]:
            for question in case.get("alert_rule_test", []):
                if question["alertname"] == name:
                    assert case["input_series"], "silence about nothing proves nothing"
                    fires.add(bool(question.get("exp_alerts")))
    assert fires == {True, False}


@pytest.mark.parametrize("name", sorted(DESIGNED))
def test_an_alert_waits_and_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    rule = alerts()[name]
    assert re.fullmatch(r"[1-9]\d*m", rule["for"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert len(rule["annotations"]["summary"]) < 120


def test_every_alert_has_its_section_in_the_runbook_and_every_section_its_alert() -> None:
    headings = re.findall(r"^### (Openworld\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK.relative_to(ROOT)}#{name.lower()}"


def test_the_targets_have_the_names_that_the_rules_know() -> None:
    jobs = {job["job_name"] for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}
    named = set(re.findall(r'job="([^"]+)"', RULES.read_text()))
    assert named == jobs == {"openworld-server", "openworld-trainer"}


def test_rules_are_found_where_the_configuration_looks_for_them() -> None:
    (pattern,) = yaml.safe_load(CONFIG.read_text())["rule_files"]
    assert list(PROMETHEUS.glob(pattern)) == [RULES]


# Names


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_ask_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    found = metrics_in(rule["expr"])
    assert found
    assert found <= exported() | recorded() | OF_PROMETHEUS


@pytest.mark.parametrize("question", list(queries()), ids=lambda question: question.where)
def test_dashboards_ask_for_metrics_that_exist(question: Any) -> None:
    found = metrics_in(question.rendered("1m"))
    assert found
    assert found <= exported() | recorded() | OF_PROMETHEUS


def test_every_metric_of_ours_is_on_a_dashboard_or_in_a_rule() -> None:
    """What nobody looks at need not be measured."""
    shown = set().union(*(metrics_in(question.rendered("1m")) for question in queries()))
    shown |= set().union(*(metrics_in(rule["expr"]) for rule in rules()))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported() if name.startswith("openworld_")}
    assert ours <= bases, "put it on a dashboard: deploy/grafana"


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ('sum by (job, le) (rate(a_total{b="c d"}[5m])) / on (e) group_left () f:g:h5m > 0.5', {"a_total", "f:g:h5m"}),
        ("a unless max by (version) (a offset 1m) and on (x) b == 1e3", {"a", "b"}),
        ("(sum(a) or vector(0)) / scalar(c) * 20", {"a", "c"}),
    ],
)
def test_names_are_told_from_labels_functions_and_numbers(expr: str, names: set[str]) -> None:
    assert metrics_in(expr) == names


def test_shortened_rules_are_the_same_but_for_their_times() -> None:
    text = shortened(RULES.read_text(), 60, 300)
    assert "rate(openworld_predictions_total[5000ms])" in text
    assert "for: 2000ms" in text
    assert len(yaml.safe_load(text)["groups"]) == len(yaml.safe_load(RULES.read_text())["groups"])
    assert re.sub(r"\d+(ms|[smhd])", "", text) == re.sub(r"\d+(ms|[smhd])", "", RULES.read_text())


# Dashboards


def test_the_dashboards_are_what_their_code_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(GRAFANA / "generate.py"), str(tmp_path)], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (GRAFANA / "dashboards").iterdir()}
    assert made == kept, "run: make docs"


def test_dashboards_keep_their_uids_so_that_links_to_them_last() -> None:
    assert {(board["uid"], board["title"]) for board in dashboards().values()} == {
        ("openworld-quality", "OOD and quality"),
        ("openworld-serving", "Service and trainer"),
    }


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_panels_explain_themselves_and_know_their_units(name: str) -> None:
    board = dashboards()[name]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in board["panels"]]
    assert len(titles) == len(set(titles))
    for panel in panels(board):
        assert len(panel["description"]) > 20, panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        assert defaults["thresholds"]["steps"][0]["value"] is None, panel["title"]
        assert panel["targets"], panel["title"]


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_panels_lie_side_by_side_and_not_on_top_of_each_other(name: str) -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for panel in dashboards()[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        taken.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert set(taken.values()) == {1}


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_everything_is_asked_of_the_chosen_datasource(name: str) -> None:
    board = dashboards()[name]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert set(variables) == {"datasource", "client"}
    (provisioned,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert variables["datasource"]["query"] == provisioned["type"]
    assert variables["datasource"]["current"]["value"] == provisioned["uid"]
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    askers = [*panels(board), *board["annotations"]["list"], variables["client"]]
    askers += [target for panel in panels(board) for target in panel["targets"]]
    assert all(asker["datasource"] == wanted for asker in askers)


def test_grafana_finds_the_dashboards_where_compose_puts_them() -> None:
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "openworld.yml").read_text())["providers"]
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
    (mounted,) = (volume.split(":")[1] for volume in service["volumes"] if volume.startswith("./deploy/grafana:"))
    assert provider["options"]["path"] == f"{mounted}/dashboards"
    assert service["environment"]["GF_PATHS_PROVISIONING"] == f"{mounted}/provisioning"


def test_grafana_knows_how_often_prometheus_scrapes() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == yaml.safe_load(CONFIG.read_text())["global"]["scrape_interval"]
