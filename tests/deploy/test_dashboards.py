"""The Grafana dashboards are valid, complete, and refer to metrics, settings and runbooks that exist."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import yaml

from openworld.environment import KNOWN
from tests.support.paths import ROOT
from tests.support.prometheus import (
    BUILT_IN_METRICS,
    CONFIG,
    GRAFANA,
    RUNBOOK,
    Query,
    dashboards,
    exported_metrics,
    metrics_in,
    panels,
    queries,
    recorded,
    rules,
)

PROVISIONING = GRAFANA / "provisioning"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

every_dashboard = pytest.mark.parametrize("name", sorted(dashboards()))


def datasource() -> dict[str, Any]:
    (found,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    return dict(found)


# Metrics


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: query.where)
def test_queries_use_existing_metrics(query: Query) -> None:
    found = metrics_in(query.rendered("1m"))
    assert found
    assert found <= exported_metrics() | recorded() | BUILT_IN_METRICS


def test_every_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    shown = set().union(*(metrics_in(query.rendered("1m")) for query in queries()))
    shown |= set().union(*(metrics_in(rule["expr"]) for rule in rules()))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported_metrics() if name.startswith("openworld_")}
    assert ours <= bases, "put it on a dashboard in deploy/grafana, or remove the metric"


# Files


def test_dashboards_keep_their_uids_because_links_contain_them() -> None:
    assert {(name, board["uid"], board["title"]) for name, board in dashboards().items()} == {
        ("openworld-quality", "openworld-quality", "OOD and quality"),
        ("openworld-serving", "openworld-serving", "Service and trainer"),
    }


@every_dashboard
def test_files_are_formatted_so_that_changes_are_readable(name: str) -> None:
    text = (GRAFANA / "dashboards" / f"{name}.json").read_text()
    assert text == json.dumps(dashboards()[name], indent=2, ensure_ascii=False) + "\n"


@every_dashboard
def test_texts_name_existing_settings_and_documents(name: str) -> None:
    text = json.dumps(dashboards()[name])
    assert set(re.findall(r"OPENWORLD_[A-Z_]+", text)) <= KNOWN
    assert all((ROOT / path).is_file() for path in re.findall(r"docs/[\w/]+\.md", text))


def test_the_runbook_names_existing_dashboards_rows_and_panels() -> None:
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", RUNBOOK.read_text()))
    boards = dashboards().values()
    assert named
    assert named <= {board["title"] for board in boards} | {p["title"] for board in boards for p in board["panels"]}


@every_dashboard
def test_links_lead_to_the_other_dashboards(name: str) -> None:
    (link,) = dashboards()[name]["links"]
    assert link["type"] == "dashboards"
    assert all(link["tags"] == board["tags"] for board in dashboards().values())


# Panels


@every_dashboard
def test_panels_have_unique_ids_and_titles(name: str) -> None:
    board = dashboards()[name]
    for field in ("id", "title"):
        values = [panel[field] for panel in board["panels"]]
        assert len(values) == len(set(values)), field
    assert board["panels"][0]["type"] == "row"


@every_dashboard
def test_panels_have_descriptions_units_thresholds_and_queries(name: str) -> None:
    for panel in panels(dashboards()[name]):
        assert len(panel["description"]) > 20, panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        first, *others = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert first is None, panel["title"]
        assert all(low < high for low, high in pairwise(others)), panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references, panel["title"]
        assert len(references) == len(set(references)), panel["title"]


@every_dashboard
def test_panels_query_a_range_or_an_instant_by_their_type(name: str) -> None:
    formats = {"timeseries": "time_series", "stat": "time_series", "heatmap": "heatmap", "table": "table"}
    for panel in panels(dashboards()[name]):
        instant = panel["type"] in ("stat", "table")
        for target in panel["targets"]:
            assert (target["instant"], target["range"]) == (instant, not instant), panel["title"]
            assert target["format"] == formats[panel["type"]], panel["title"]


@every_dashboard
def test_panels_do_not_overlap(name: str) -> None:
    cells: Counter[tuple[int, int]] = Counter()
    for panel in dashboards()[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert set(cells.values()) == {1}


@every_dashboard
def test_every_query_uses_the_selected_datasource(name: str) -> None:
    board = dashboards()[name]
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert set(variables) == {"datasource", "client"}
    assert variables["datasource"]["query"] == datasource()["type"]
    assert variables["datasource"]["current"]["value"] == datasource()["uid"]
    users = [*panels(board), *board["annotations"]["list"], variables["client"]]
    users += [target for panel in panels(board) for target in panel["targets"]]
    assert all(user["datasource"] == DATASOURCE for user in users)


# Provisioning


def test_grafana_reads_the_dashboards_from_the_folder_that_compose_mounts() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "openworld.yml").read_text())["providers"]
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
    (mounted,) = (volume.split(":")[1] for volume in service["volumes"] if volume.startswith("./deploy/grafana:"))
    assert provider["options"]["path"] == f"{mounted}/dashboards"
    assert service["environment"]["GF_PATHS_PROVISIONING"] == f"{mounted}/provisioning"


def test_grafana_knows_the_scrape_interval_of_prometheus() -> None:
    scrape_interval = yaml.safe_load(CONFIG.read_text())["global"]["scrape_interval"]
    assert datasource()["jsonData"]["timeInterval"] == scrape_interval
