"""The report of a suite from its finished cells: a Markdown table, checks with figures, plots, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from benchmarks.accuracy import baselines, methods, product_v1, theory
from benchmarks.accuracy.bootstrap import interval
from benchmarks.accuracy.cells import outcomes
from benchmarks.accuracy.checks import NO_RIVALS, acceptance
from benchmarks.accuracy.streams import SUITES

ABOUT = {**methods.ABOUT, **product_v1.ABOUT, **baselines.ABOUT}
OVERLAP = (
    "The backbone saw ImageNet-1k, whose classes overlap with those of the data sets: the figures compare methods with "
    "each other in this run, not with published ones."
)
# Figure -> heading; all in percent but the seconds.
COLUMNS = {
    "last": "last acc.",
    "aia": "AIA",
    "ai_auc": "AI-AUC",
    "fpr95": "FPR95",
    "rejected": "known rejected",
    "flagged": "unknown flagged",
    "ece": "ECE",
    "self_accuracy": "self-reported acc.",
    "self_auc": "self-reported AUC",
    "forgetting": "forgetting",
    "within_task": "within-task",
    "task_prediction": "task pred.",
    "seconds": "s per task",
}
Table = dict[tuple[str, int], dict[str, dict[str, Any]]]  # (data set, images per class) -> method -> what was measured


def collect(files: Sequence[Path]) -> Table:
    """What every method did on every data set, one entry of its lists per class order."""
    table: Table = {}
    for file in sorted(files):
        document = json.loads(file.read_bytes())
        cell = document["cell"]
        for name, result in document["methods"].items():
            of_set = table.setdefault((cell["data"], cell["per_class"]), {})
            row = of_set.setdefault(name, {"orders": [], "files": [], "results": []})
            row["orders"].append(cell["order"])
            row["files"].append(file)
            row["results"].append(result)
    for of_set in table.values():
        for row in of_set.values():
            figures = [result["figures"] for result in row["results"]]
            row["mean"] = {name: _mean([own[name] for own in figures]) for name in figures[0]}
            row["spread"] = {name: _spread([own[name] for own in figures]) for name in figures[0]}
    return table


def differences(table: Table) -> list[dict[str, Any]]:
    """Ours against the best other method, with its paired interval, per data set."""
    out = []
    for (data, per_class), rows in table.items():
        for figure in ("last", "ai_auc"):
            others = {name: row for name, row in rows.items() if name != "ours" and name not in NO_RIVALS}
            if "ours" not in rows or not others:
                continue
            best = max(others, key=lambda name: others[name]["mean"][figure])
            ours = dict(zip(rows["ours"]["orders"], rows["ours"]["files"], strict=True))
            other = dict(zip(others[best]["orders"], others[best]["files"], strict=True))
            both = sorted(ours.keys() & other.keys())
            if not both:
                continue
            point, low, high = interval(
                [outcomes(ours[order], "ours") for order in both],
                [outcomes(other[order], best) for order in both],
                figure,
            )
            entry = {"data": data, "per_class": per_class, "figure": figure, "best_other": best}
            out.append({**entry, "difference": point, "low": low, "high": high})
    return out


def write(out: Path, suite: str, files: Sequence[Path], command: str) -> str:
    """Write `accuracy-<suite>` as .md, .json and .png; returns the Markdown."""
    table, documents = collect(files), [json.loads(file.read_bytes()) for file in files]
    compared = differences(table)
    checks = acceptance(table, compared)
    facts = {
        "suite": suite,
        "about": SUITES[suite].about,
        "command": f"python -m benchmarks.accuracy {command}",
        "commits": sorted({document["commit"] for document in documents}),
        "machine": documents[0]["machine"],
        "seconds": sum(document["seconds"] for document in documents),
        "test_images": {document["cell"]["data"]: document["test_images"] for document in documents},
        "constants": {
            document["cell"]["data"]: document["facts"] for document in documents if document["cell"]["group"] == "ours"
        },
    }
    plot = out / f"accuracy-{suite}.png"
    text = markdown(facts, table, compared, checks, plot.name)
    if suite.startswith("without-images"):
        kept = [
            {"data": own["cell"]["data"], "group": own["cell"]["group"], "bytes": own["facts"]["bytes"]}
            for own in documents
            if own["cell"]["order"] == 0 and "bytes" in own["facts"]
        ]
        of_theory = plot.with_name(f"theory-{suite}.png")
        theory.plot(of_theory, table)
        text += "\n".join(theory.markdown(table, kept, of_theory.name))
    plot.with_suffix(".md").write_text(text)
    rows = {
        f"{data}, {per_class} images per class": {
            name: {key: row[key] for key in ("orders", "mean", "spread", "results")} for name, row in methods.items()
        }
        for (data, per_class), methods in table.items()
    }
    document = {**facts, "checks": checks, "differences": compared, "results": rows}
    plot.with_suffix(".json").write_text(json.dumps(_rounded(document), indent=1) + "\n")
    _plot(plot, table)
    return text


def markdown(
    facts: dict[str, Any], table: Table, compared: Sequence[dict[str, Any]], checks: Sequence[dict[str, Any]], plot: str
) -> str:
    where = facts["machine"]
    lines = [
        f"# Accuracy: {facts['about']}",
        "",
        f"`{facts['command']}`",
        "",
        f"Code of commit {', '.join(facts['commits'])}, on {where['cpu']}, {where['cores']} cores; "
        f"{facts['seconds']:.0f} s. {OVERLAP}",
        "",
        "Mean over class orders, with the standard deviation over them; AI-AUC, FPR95, known rejected, unknown flagged "
        "and ECE are means over tasks. In bold: the best method that learns task by task.",
        "",
        "| data | method | " + " | ".join(COLUMNS.values()) + " |",
        "| --- | --- |" + " ---: |" * len(COLUMNS),
    ]
    for (data, per_class), rows in table.items():
        best = {figure: _best(rows, figure) for figure in ("last", "aia", "ai_auc")}
        for name in sorted(rows, key=list(ABOUT).index):
            shown = [_shown(rows[name], figure, best.get(figure) == name) for figure in COLUMNS]
            lines.append(f"| {data}, {per_class} | {name} | " + " | ".join(shown) + " |")
    lines += ["", "Ours against the best other method, difference in points and its paired 90 % interval over class "]
    lines[-1] += "orders and test images:"
    lines.append("")
    for entry in compared:
        span = f"{100 * entry['low']:+.1f} to {100 * entry['high']:+.1f}"
        lines.append(
            f"- {entry['data']}, {entry['per_class']} images per class, {COLUMNS[entry['figure']]}: "
            f"{100 * entry['difference']:+.1f} ({span}) against {entry['best_other']}"
        )
    lines += ["", "Checks of acceptance:", ""]
    lines += [f"- {check['text']}: {'met' if check['met'] else 'not met'}" for check in checks]
    gap = max(
        result["theorem_1"]["largest_relative_gap"]
        for rows in table.values()
        for row in rows.values()
        for result in row["results"]
    )
    lines += ["", f"Theorem 1, H_CIL = H_WP + H_TP: the largest relative gap of any image and method is {gap:.1e}.", ""]
    lines += [f"- `{name}`: {about}" for name, about in ABOUT.items() if any(name in rows for rows in table.values())]
    lines += ["", "Fitted constants of the last version of one stream per data set:", ""]
    for data, constants in facts["constants"].items():
        rule = ", ".join(f"{name} {value:.3g}" for name, value in constants["rule"]["weights"].items())
        weights = ", ".join(f"{value:.3g}" for value in constants["novelty"]["weights"])
        lines.append(f"- {data}: rule {rule}; novelty {weights}; prior: {constants['prior']}")
    lines += ["", f"![accuracy and AUC after each task]({plot})", ""]
    return "\n".join(lines)


def _rounded(value: Any) -> Any:
    """With five significant digits: the cells keep all."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: _rounded(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_rounded(entry) for entry in value]
    return value


def _shown(row: dict[str, Any], figure: str, bold: bool) -> str:
    mean, spread = row["mean"][figure], row["spread"][figure]
    if mean is None:
        return ""
    factor = 1 if figure == "seconds" else 100
    text = f"{factor * mean:.1f}" + ("" if spread is None else f" ± {factor * spread:.1f}")
    return f"**{text}**" if bold else text


def _best(rows: dict[str, dict[str, Any]], figure: str) -> str | None:
    values = {
        name: row["mean"][figure]
        for name, row in rows.items()
        if name not in NO_RIVALS and row["mean"][figure] is not None
    }
    return max(values, key=lambda name: values[name]) if values else None


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def _spread(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.std(defined, ddof=1)) if len(defined) > 1 else None


def _plot(path: Path, table: Table) -> None:
    """Accuracy and AUC after each task: one row of two plots per data set, the mean over class orders."""
    figure, axes = plt.subplots(len(table), 2, figsize=(11, 3.6 * len(table)), squeeze=False, constrained_layout=True)
    for (left, right), ((data, per_class), rows) in zip(axes, table.items(), strict=True):
        for axis in (left, right):
            axis.set_prop_cycle(color=[matplotlib.colormaps["tab20"](number) for number in range(20)])
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        for name, row in sorted(rows.items(), key=lambda entry: list(ABOUT).index(entry[0])):
            for axis, metric in ((left, "accuracy"), (right, "auc")):
                values = np.array([result[metric] for result in row["results"]], np.float64)  # None becomes NaN
                style = {"linewidth": 2.5} if name == "ours" else {"linewidth": 1.0}
                mean = 100 * values.mean(axis=0)
                axis.plot(range(1, len(mean) + 1), mean, "o-", markersize=3, label=name, **style)
        left.set(title=f"{data}, {per_class} images per class: accuracy", ylabel="%")
        right.set(title="AUC, known against all other classes")
        for axis in (left, right):
            axis.grid(alpha=0.3)
            axis.set_xlabel("tasks learned")
    axes[0][1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=100)
    plt.close(figure)
