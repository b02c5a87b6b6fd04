"""The plot of a report: images per second, latency, memory and seconds against the number of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Figures = Mapping[str, Any]
ROWS: tuple[tuple[str, dict[str, Callable[[Figures], float]]], ...] = (
    ("images per second", {"service": lambda cell: cell["saturated"]["images_per_second"]}),
    (
        "milliseconds",
        {
            "saturated, p99": lambda cell: cell["saturated"]["p99_ms"],
            "saturated, p50": lambda cell: cell["saturated"]["p50_ms"],
            "idle, p99": lambda cell: cell["idle"]["p99_ms"],
            "idle, p50": lambda cell: cell["idle"]["p50_ms"],
        },
    ),
    ("memory, MiB", {"server": lambda cell: cell["memory_mib"]}),
    (
        "seconds",
        {"cold start": lambda cell: cell["cold_start_seconds"], "swap": lambda cell: cell["swap_seconds"]},
    ),
)


def draw(configurations: Mapping[str, Figures], file: Path) -> None:
    """One column per configuration."""
    figure, axes = plt.subplots(
        len(ROWS), len(configurations), figsize=(4.5 * len(configurations), 2.6 * len(ROWS)), squeeze=False
    )
    for column, (name, found) in enumerate(configurations.items()):
        tasks = [int(number) for number in found["tasks"]]
        for row, (label, lines) in enumerate(ROWS):
            axis = axes[row][column]
            for line, value in lines.items():
                axis.plot(tasks, [value(cell) for cell in found["tasks"].values()], marker="o", label=line)
            if row == 0:
                axis.set_title(name)
                axis.axhline(found["limit_images_per_second"], color="grey", linestyle="--", label="one frozen forward")
            axis.set_ylim(bottom=0)
            axis.set_xlabel("tasks")
            axis.set_ylabel(label)
            axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
