"""Tables and numbers that commands print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from models.versions.manifest import Manifest
from openworld.progress import duration
from service.wire.advice import Advice
from service.wire.versions import LEAST_CLASSES_FOR_AUC

PIPE_WIDTH = 200  # columns, if stdout is not a terminal


def console() -> Console:
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=PIPE_WIDTH)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None) -> Table:
    """A table; a column name that ends with a space is right-aligned. Cells are never markup, and folded, not cut."""
    out = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        out.add_column(column.strip(), overflow="fold", justify="right" if column.endswith(" ") else "left")
    for row in rows:
        out.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return out


def task_table(reports: Iterable[Mapping[str, Any]]) -> Table:
    """Accuracy and AUC of every task on its held-out images, before and after."""
    rows = [
        [
            str(report["task"] + 1),
            names(report["classes"]),
            str(report["images"]),
            change(report["accuracy_before"], report["accuracy_after"], percent),
            change(report["auc_before"], report["auc_after"], ratio),
        ]
        for report in reports
    ]
    return table(["task ", "classes", "held-out images ", "accuracy ", "AUC "], rows)


def print_report(manifest: Manifest) -> None:
    """What a version learned, and what it changed for earlier tasks."""
    metrics = manifest.metrics
    out = console()
    out.print(task_table(metrics["tasks"]))
    capacity, backbone = metrics["capacity"], manifest.backbone
    facts = {
        "version": _lineage(manifest),
        "images": ", ".join(f"{name} ({n})" for name, n in metrics["images_per_class"].items()),
        "estimate": estimate(metrics, len(manifest.classes)),
        "never seen": _threshold(manifest),
        "rule": _rule(manifest),
        "capacity": f"{percent(capacity['used_max'])} of {capacity['bottleneck']} units in the fullest adapter, "
        f"{percent(capacity['used_mean'])} on average",
        "backbone": f"{backbone['name']} (weights: {backbone['source']})",
        "time": duration(metrics["seconds"]),
    }
    grid = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        grid.add_row(name, Text(fact))
    out.print(grid)


def _rule(manifest: Manifest) -> str:
    """The rule, and why it weighs what was trained or does not."""
    name, gain = manifest.rule["name"], manifest.metrics.get("networks")
    if gain is None:
        return str(name)
    trained, frozen = f"{gain['networks']:.3f}", f"{gain['closed_form']:.3f}"
    return f"{name} (cross-entropy on held-out images {trained} with training, {frozen} in closed form)"


def estimate(metrics: Mapping[str, Any], classes: int) -> str:
    """What a version with so many classes should reach on fresh images."""
    accuracy = f"for fresh images, accuracy {percent(metrics['accuracy'])}"
    if classes < LEAST_CLASSES_FOR_AUC:
        return f"{accuracy}; too few classes to estimate how well novel images are recognised"
    return f"{accuracy}, AUC of novelty {ratio(metrics['novelty_auc'])}"


def print_advice(advice: Advice, images: Mapping[str, str]) -> None:
    """What would help, in sentences; `images` are the names of images, by sha256."""
    if lines := advice.in_words(images):
        console().print("what would help:", *(Text(f"  - {line}") for line in lines), sep="\n")


def names(classes: Sequence[str], shown: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(classes) - shown} more" if len(classes) > shown else ""
    return ", ".join(classes[:shown]) + more


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(bytes: int) -> str:
    return f"{bytes} bytes" if bytes < 1000 else f"{bytes / 1000:.1f} kB" if bytes < 1e6 else f"{bytes / 1e6:.1f} MB"


def date(iso: str) -> str:
    return iso[:16].replace("T", " ")


def change(before: float | None, after: float | None, form: Callable[[float | None], str]) -> str:
    return form(after) if before is None else f"{form(before)} → {form(after)}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _threshold(manifest: Manifest) -> str:
    """Which images are answered as never seen."""
    if manifest.threshold is None:
        return "every image"
    if manifest.settings["flag"] is not None:
        return f"{100 * manifest.settings['flag']:.0f} % of simulated novel images"
    return f"what scores below {100 * manifest.settings['accept']:.0f} % of known images"


def _lineage(manifest: Manifest) -> str:
    if not manifest.version:
        return "none: rejected"
    return f"{manifest.version}, built on {manifest.parent}" if manifest.parent else f"{manifest.version}, the first"
