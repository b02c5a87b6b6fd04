"""What the paper claims of methods without replay, checked with the figures of a suite, and the plot of its theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

Rows = Mapping[str, Mapping[str, Any]]  # method -> what was measured
Points = dict[str, list[tuple[float, float]]]  # method -> (AUC of a task, class-incremental accuracy of its images)
FIGURES = {"last": "last accuracy", "ai_auc": "AI-AUC"}
# (better, worse, claim)
CLAIMS = tuple(
    pair
    for own in ("hat", "sup")
    for pair in (
        (f"{own}-odin", own, "ODIN above plain"),
        (f"{own}-csi", own, "CSI above plain"),
        (f"{own}-csi", f"{own}-odin", "CSI above ODIN"),
        (f"{own}-csi-c", f"{own}-csi", "+c above without"),
        (f"{own}-csi-c", f"{own}-csi-c-draws", "+c on images above +c on draws"),
        (f"{own}-csi", f"{own}-csi-one", "four rotations above one"),
    )
)
PRODUCTS = ("hat-csi-product", "hat-csi-statistics", "sup-csi-product", "provisional")  # modes that keep no image
LARGEST_LOSS = 3.0  # points, of the best mode without images against the default


def claims(table: Mapping[Any, Rows]) -> list[dict[str, Any]]:
    """Each claim with the mean difference over the data sets, in points."""
    out = []
    for better, worse, claim in CLAIMS:
        for figure, name in FIGURES.items():
            both = [rows for rows in table.values() if better in rows and worse in rows]
            if both:
                leads = [100 * (rows[better]["mean"][figure] - rows[worse]["mean"][figure]) for rows in both]
                mean = float(np.mean(leads))
                parts = ", ".join(f"{lead:+.1f}" for lead in leads)
                text = f"{claim}, {better} - {worse}, {name}: {mean:+.1f} ({parts})"
                out.append({"text": text, "held": mean > 0})
    return out


def losses(table: Mapping[Any, Rows]) -> list[dict[str, Any]]:
    """What each mode without images loses against the default, in points; the best must lose little."""
    out = []
    for figure, name in FIGURES.items():
        for mode in PRODUCTS:
            both = [rows for rows in table.values() if mode in rows and "ours" in rows]
            if both:
                loss = float(
                    np.mean([100 * (rows["ours"]["mean"][figure] - rows[mode]["mean"][figure]) for rows in both])
                )
                out.append({"text": f"ours - {mode}, {name}: {loss:+.1f}", "held": loss <= LARGEST_LOSS})
    return out


def points(table: Mapping[Any, Rows]) -> Points:
    """Every task of every method, data set and class order, after the last task."""
    out: Points = {}
    for rows in table.values():
        for name, row in rows.items():
            for result in row["results"]:
                pairs = zip(result["task_auc"], result["task_accuracy"], strict=True)
                out.setdefault(name, []).extend((auc, accuracy) for auc, accuracy in pairs if auc is not None)
    return out


def correlation(found: Points) -> float:
    """Pearson's, over all points."""
    every = np.array([pair for own in found.values() for pair in own])
    return float(np.corrcoef(every.T)[0, 1]) if len(every) > 1 else float("nan")


def markdown(table: Mapping[Any, Rows], kept: Sequence[Mapping[str, Any]], plot: str) -> list[str]:
    """`kept` has the facts of the cells with the method and what a task of it keeps."""
    lines = ["", "Claims of the paper, in points, the mean over data sets and each of them:", ""]
    lines += [f"- {claim['text']}: {'held' if claim['held'] else 'not held'}" for claim in claims(table)]
    lines += ["", f"Modes without images against the default, at most {LARGEST_LOSS:g} points lost:", ""]
    lines += [f"- {loss['text']}: {'held' if loss['held'] else 'not held'}" for loss in losses(table)]
    lines += ["", "Kept per task, in kB. Here all methods keep images or features, for calibration:", ""]
    lines += ["| data | training | network | statistics | images | features |", "| --- | --- |" + " ---: |" * 4]
    for entry in kept:
        shown = " | ".join(
            f"{entry['bytes'][name] / 1000:.0f}" for name in ("network", "statistics", "images", "features")
        )
        lines.append(f"| {entry['data']} | {entry['group']} | {shown} |")
    found = correlation(points(table))
    lines += [
        "",
        "The theory: a task that tells its own images from others better (AUC) has a higher class-incremental",
    ]
    lines[-1] += f" accuracy. Correlation over all methods and tasks: {found:.2f}."
    return [*lines, "", f"![AUC of a task against class-incremental accuracy]({plot})", ""]


def plot(path: Path, table: Mapping[Any, Rows]) -> None:
    found = points(table)
    figure, axis = plt.subplots(figsize=(7, 5.5), constrained_layout=True)
    for name, own in found.items():
        auc, accuracy = 100 * np.array(own).T
        axis.plot(auc, accuracy, "o", markersize=3, label=name)
    axis.set(xlabel="AUC, images of a task against those of other tasks, %", ylabel="class-incremental accuracy, %")
    axis.set_title(f"correlation {correlation(found):.2f}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=100)
    plt.close(figure)
