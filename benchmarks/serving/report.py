"""The report of all rounds: medians, ratios and bars, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.serving.contenders import BARE, SERVICE
from benchmarks.serving.figures import medians
from benchmarks.serving.run import BAR

OF_BARE, ADDED_MS = 0.90, 3.0
BESIDE = "parallel"  # a bare loop shown for comparison only
QUIET = 0.15  # cores; above this the figures are doubtful

Rounds = Mapping[str, Sequence[Mapping[str, Any]]]  # by contender, one entry per round


def summarise(rounds: Rounds) -> dict[str, Any]:
    """Medians of every contender, the service's ratios round by round, and the bars."""
    middle = {name: medians(entries) for name, entries in rounds.items()}
    fast = [_rate(served) / loop["images_per_second"] for served, loop in _pairs(rounds, BARE)]
    added = [served["idle"]["p50_ms"] - loop["idle"]["p50_ms"] for served, loop in _pairs(rounds, BARE)]
    ratios = {name: [_rate(served) / _rate(peer) for served, peer in _pairs(rounds, name)] for name in _peers(rounds)}
    bars = [
        bar(f"images/s, share of the {BARE}'s", fast, f">= {OF_BARE}", median(fast) >= OF_BARE),
        bar(f"ms added to the {BARE} at p50, idle", added, f"<= {ADDED_MS}", median(added) <= ADDED_MS),
        bar("requests with an error or a wrong label", *_mistakes(rounds[SERVICE])),
    ]
    for name, times in ratios.items():
        bars.append(bar(f"images/s, times {name}'s", times, "> 1", median(times) > 1))
        late = [served["saturated"]["p99_ms"] / peer["saturated"]["p99_ms"] for served, peer in _pairs(rounds, name)]
        bars.append(bar(f"p99 at saturation, share of {name}'s", late, "< 1", median(late) < 1))
    noise = max(others for name in rounds for others in _others(rounds[name]))
    return {"median": middle, "bars": bars, "most_taken_by_others": noise, "quiet": noise <= QUIET}


def bar(name: str, found: Sequence[float], wanted: str, met: bool) -> dict[str, Any]:
    """One bar: the median over the rounds, and all rounds."""
    return {
        "name": name,
        "wanted": wanted,
        "found": round(median(found), 3),
        "met": met,
        "rounds": [round(value, 3) for value in found],
    }


def _mistakes(entries: Sequence[Mapping[str, Any]]) -> tuple[list[float], str, bool]:
    found = [
        float(sum(entry[load]["wrong"] + sum(entry[load]["errors"].values()) for load in ("idle", "saturated")))
        for entry in entries
    ]
    return found, "0", not any(found)


def _others(entries: Sequence[Mapping[str, Any]]) -> list[float]:
    parts = [part for entry in entries for part in (entry, entry["idle"], entry.get("saturated", {}))]
    return [float(part["others"]) for part in parts if "others" in part]


def _peers(rounds: Rounds) -> list[str]:
    return [name for name in rounds if name not in (BARE, SERVICE)]


def _pairs(rounds: Rounds, other: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The service and another contender, paired by round."""
    return list(zip(rounds[SERVICE], rounds[other], strict=True))


def _rate(entry: Mapping[str, Any]) -> float:
    return float(entry["saturated"]["images_per_second"])


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print the report as tables."""
    result = document["result"]
    console.print(_contenders(document, result["median"]))
    console.print(_bars(result["bars"]))
    if not result["quiet"]:
        taken = result["most_taken_by_others"]
        console.print(Text(f"doubtful: other processes took up to {taken:g} cores; measure on an idle machine"))
    for name, entry in document["contenders"].items():
        if "not_measured" in entry:
            console.print(Text(f"{name} was not measured: {entry['not_measured']}"))


def _contenders(document: Mapping[str, Any], middle: Mapping[str, Any]) -> Table:
    clients, rounds = document["settings"]["clients"], document["settings"]["rounds"]
    table = Table(title=f"{clients} clients, median of {rounds} rounds", title_justify="left")
    table.add_column("")
    for column in ("images/s", "p50 ms", "p99 ms", "idle p50 ms", "idle p99 ms", "CPU ms per image", "errors", "wrong"):
        table.add_column(column, justify="right")
    for name, entry in middle.items():
        idle, loaded = entry["idle"], entry.get("saturated", {})
        busy = loaded or entry
        cells = [f"{busy['images_per_second']:.1f}"]
        cells += [f"{loaded[key]:.1f}" if loaded else "" for key in ("p50_ms", "p99_ms")]
        cells += [f"{idle[key]:.2f}" for key in ("p50_ms", "p99_ms")]
        cells += [f"{busy['cpu_ms_per_image']:.1f}"]
        every = document["contenders"][name]["rounds"]
        errors = sum(sum(r[load]["errors"].values()) for r in every for load in ("idle", "saturated") if load in r)
        wrong = sum(r[load]["wrong"] for r in every for load in ("idle", "saturated") if load in r)
        table.add_row(Text(name), *cells, str(errors), str(wrong))
    for way in (*BAR, BESIDE):
        loop = middle[BARE][way]
        cells = [f"{loop['images_per_second']:.1f}", *[""] * 4, f"{loop['cpu_ms_per_image']:.1f}"]
        table.add_row(Text(f"  {BARE}, {way}", style="dim"), *cells)
    return table


def _bars(bars: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="bars", title_justify="left")
    for column in ("", "wanted", "found", "rounds", "met"):
        table.add_column(column)
    for entry in bars:
        met = Text("yes", style="green") if entry["met"] else Text("no", style="red")
        rounds = ", ".join(f"{value:g}" for value in entry["rounds"])
        table.add_row(Text(entry["name"]), entry["wanted"], f"{entry['found']:g}", rounds, met)
    return table
