"""The report of a run as JSON, a Markdown table and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.accuracy.metrics import Result
from benchmarks.accuracy.run import METHODS

OVERLAP = (
    "The backbone saw ImageNet-1k, whose classes overlap with the test set's: the figures compare methods with each "
    "other in this run, not with published ones, which use a backbone cleaned of those classes."
)


def write(out: Path, facts: dict[str, Any], results: dict[str, Result]) -> None:
    """`out`.json, and beside it .md and .png."""
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {**facts, "methods": {name: result.to_dict() for name, result in results.items()}}
    out.write_text(json.dumps(document, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(facts, results, out.with_suffix(".png").name))
    _plot(out.with_suffix(".png"), facts, results)


def markdown(facts: dict[str, Any], results: dict[str, Result], plot: str) -> str:
    """The table: percentages, the method with the best mean in bold."""
    best = max(results, key=lambda name: results[name].mean)
    head = (
        "method", "last acc.", "AIA", "AI-AUC", "mean of both", "forgetting", "within-task", "task pred.",
        "H_CIL", "H_WP + H_TP",
    )  # fmt: skip
    rows = ["| " + " | ".join(head) + " |", "|" + " --- |" + " ---: |" * (len(head) - 1)]
    for name, result in results.items():
        shares = [
            result.last, result.aia, result.ai_auc, result.mean, result.forgetting, result.within_task,
            result.task_prediction,
        ]  # fmt: skip
        entropy = result.theorem_1
        cells = [f"{100 * share:.1f}" for share in shares]
        cells += [f"{entropy['h_cil']:.4f}", f"{entropy['h_wp'] + entropy['h_tp']:.4f}"]
        label = f"**{name}**" if name == best else name
        rows.append("| " + " | ".join([label, *cells]) + " |")
    gap = max(result.theorem_1["largest_relative_gap"] for result in results.values())
    about = [f"- `{name}`: {METHODS[name].about}" for name in results]
    where = facts["machine"]
    return "\n".join(
        [
            f"# {facts['title']}",
            "",
            f"`{facts['command']}`",
            "",
            f"Measured {facts['date']} on {where['cpu']}, {where['cores']} cores; {facts['seconds']:.0f} s. {OVERLAP}",
            "",
            *rows,
            "",
            f"Theorem 1, H_CIL = H_WP + H_TP: the largest relative gap of any image and method is {gap:.1e}.",
            "",
            *about,
            "",
            f"![accuracy and AUC after each task]({plot})",
            "",
        ]
    )


def _plot(path: Path, facts: dict[str, Any], results: dict[str, Result]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for name, result in results.items():
        left.plot(range(1, len(result.accuracy) + 1), [100 * x for x in result.accuracy], "o-", label=name)
        right.plot(range(1, len(result.auc) + 1), [100 * x for x in result.auc], "o-", label=name)
    left.set(title="accuracy over the classes learned so far", xlabel="tasks learned", ylabel="%")
    right.set(title="AUC, known against not yet learned", xlabel="tasks learned", ylabel="%")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=8)
    figure.suptitle(facts["title"])
    figure.savefig(path, dpi=110)
    plt.close(figure)
