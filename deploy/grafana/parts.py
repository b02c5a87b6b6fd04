"""What dashboards are made of: queries, panels, boards. Grafana's JSON is spelled out here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Step = tuple[str, float | None]  # from this value on, this colour; the first one from the bottom, None
Unit = Literal["percentunit", "short", "none", "s", "bytes", "reqps", "ops", "cps"]

SCHEMA = 41  # of Grafana 12
COLUMNS = 24
SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
CALM: tuple[Step, ...] = (("green", None),)


def steps(warn: float | None = None, bad: float | None = None) -> tuple[Step, ...]:
    """Green, and from these values on yellow and red."""
    found = [("green", None), ("yellow", warn), ("red", bad)]
    return tuple((colour, value) for colour, value in found if colour == "green" or value is not None)


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """`text` says what it shows, and what to make of it; it is behind the panel's small i."""

    kind: Literal["timeseries", "stat", "heatmap", "table"]
    title: str
    text: str
    queries: Sequence[Query]
    unit: Unit
    thresholds: Sequence[Step] = CALM
    width: int = 12
    height: int = 8
    top: float | None = None  # the axis ends here at least
    custom: Json = field(default_factory=dict)
    options: Json = field(default_factory=dict)
    more: Json = field(default_factory=dict)

    def to_json(self, number: int, x: int, y: int) -> Json:
        defaults: Json = {
            "unit": self.unit,
            "min": 0,
            "thresholds": {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in self.thresholds]},
            "custom": self.custom,
        }
        if self.top is not None:
            defaults["max"] = self.top
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [self._target(place, query) for place, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self.options,
            **self.more,
        }

    def _target(self, place: int, query: Query) -> Json:
        now = self.kind in ("stat", "table")
        return {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "instant": now,
            "range": not now,
            "format": {"heatmap": "heatmap", "table": "table"}.get(self.kind, "time_series"),
        }


def graph(
    title: str,
    text: str,
    *queries: Query,
    unit: Unit,
    thresholds: Sequence[Step] = CALM,
    width: int = 12,
    top: float | None = None,
    stacked: bool = False,
) -> Panel:
    """Lines over time; thresholds are drawn where there are any."""
    custom: Json = {
        "lineWidth": 1,
        "fillOpacity": 40 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if len(thresholds) > 1 else "off"},
    }
    options: Json = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return Panel("timeseries", title, text, queries, unit, thresholds, width, 8, top, custom, options)


def number(
    title: str,
    text: str,
    query: Query,
    *,
    unit: Unit,
    thresholds: Sequence[Step] = CALM,
    width: int = 6,
    name: bool = False,
) -> Panel:
    """One value, now; with `name` what the series is called, for values that are words."""
    options: Json = {
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "name" if name else "value",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return Panel("stat", title, text, [query], unit, thresholds, width, 4, None, {}, options)


def heatmap(title: str, text: str, query: Query, *, unit: Unit, middle: float) -> Panel:
    """Colours from 0 over `middle`, which is pale, to twice that."""
    options: Json = {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "mode": "scheme",
            "scheme": "RdBu",
            "reverse": True,
            "steps": 64,
            "scale": "linear",
            "exponent": 0.5,
            "fill": "dark-orange",
            "min": 0,
            "max": 2 * middle,
        },
        "cellValues": {"unit": unit},
        "filterValues": {"le": -1},  # an empty cell is a finding, too
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": True},
        "legend": {"show": True},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "yAxis": {"axisPlacement": "left", "unit": "none"},
    }
    return Panel("heatmap", title, text, [query], unit, CALM, 12, 8, None, {}, options)


def table(title: str, text: str, query: Query, *, hide: Iterable[str] = (), width: int = 12) -> Panel:
    """The labels of what there is now, a row a series."""
    excluded = dict.fromkeys(("Time", "Value", "__name__", *hide), True)
    change = {"id": "organize", "options": {"excludeByName": excluded, "indexByName": {}, "renameByName": {}}}
    options: Json = {"showHeader": True, "cellHeight": "sm"}
    return Panel(
        *("table", title, text, [query], "none", CALM, width),
        options=options,
        more={"transformations": [change]},
    )


def board(uid: str, title: str, text: str, rows: Sequence[tuple[str, Sequence[Panel]]]) -> Json:
    """A dashboard; panels flow from left to right, and every row has its heading."""
    panels: list[Json] = []
    y = 0
    for heading, row in rows:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": heading, "collapsed": False, "gridPos": place, "panels": []}
        )
        x, y, tallest = 0, y + 1, 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            panels.append(panel.to_json(len(panels) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["openworld"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "",
        "links": [{"type": "dashboards", "title": "openworld", "tags": ["openworld"], "asDropdown": False,
                   "includeVars": True, "keepTime": True, "targetBlank": False, "icon": "external link"}],
        "annotations": {"list": [_version_changes()]},
        "templating": {"list": _variables()},
        "panels": panels,
    }  # fmt: skip


def _version_changes() -> Json:
    """A line where a version begins to answer: it is there, and one step earlier it was not."""
    now, before = (f"max by (version) (openworld_model_info{when})" for when in ("", " offset $__interval"))
    return {
        "name": "Version",
        "enable": True,
        "datasource": SOURCE,
        "iconColor": "purple",
        "expr": f"{now} unless {before}",
        "step": "15s",
        "titleFormat": "version {{version}} answers",
        "tagKeys": "version",
    }


def _variables() -> list[Json]:
    clients = "label_values(openworld_predictions_total, client)"
    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": "Prometheus", "value": "prometheus"},
            "hide": 0,
            "refresh": 1,
        },
        {
            "name": "client",
            "label": "Client",
            "description": "Whose images: the name of a key. It selects outcomes; other metrics know no client.",
            "type": "query",
            "datasource": SOURCE,
            "definition": clients,
            "query": {"query": clients, "refId": "client"},
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": ["All"], "value": ["$__all"]},
            "hide": 0,
            "refresh": 2,
            "sort": 1,
        },
    ]
