"""The figures that suite `short` must reach: a committed file, per data set, with the spread of each figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.bootstrap import half_width
from benchmarks.accuracy.cells import outcomes

FILE = Path(__file__).with_name("short.json")
FIGURES = ("last", "ai_auc")
METHODS = ("ours", "paper")
LEAST_SPREAD = 0.02  # other CPUs round differently, and a figure of 100 % has no spread of its own


def measured(files: Sequence[Path]) -> dict[str, Any]:
    """data set -> method -> figure -> value and spread."""
    out: dict[str, Any] = {}
    for file in files:
        document = json.loads(file.read_bytes())
        for name in METHODS:
            if name not in document["methods"]:
                continue
            own = outcomes(file, name)
            figures = document["methods"][name]["figures"]
            out.setdefault(document["cell"]["data"], {})[name] = {
                figure: {"value": figures[figure], "spread": max(half_width(own, figure), LEAST_SPREAD)}
                for figure in FIGURES
            }
    return out


def record(path: Path, files: Sequence[Path]) -> None:
    """Replace the entries of the measured data sets; those of others stay."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**known, **measured(files)}, indent=1, sort_keys=True) + "\n")


def compare(path: Path, files: Sequence[Path]) -> list[str]:
    """What dropped by more than its spread."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    found = measured(files)
    missing = sorted(found.keys() - known.keys())
    dropped = [f"{path} has no figures of {name}: run with --write-reference" for name in missing]
    for data in sorted(found.keys() & known.keys()):
        for method, figures in known[data].items():
            for figure, entry in figures.items():
                value = found[data].get(method, {}).get(figure, {}).get("value")
                if value is None:
                    dropped.append(f"{data}, {method}: {figure} was not measured")
                elif value < entry["value"] - entry["spread"]:
                    expected = f"{entry['value']:.3f} - {entry['spread']:.3f}"
                    dropped.append(f"{data}, {method}: {figure} is {value:.3f}, below {expected}")
    return dropped
