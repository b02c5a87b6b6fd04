"""Write the figures of docs/accuracy.md from the reports of `benchmarks.accuracy`; run by `make docs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
PLOT = ROOT / "docs" / "images" / "accuracy-by-images.png"
REPORTS = ROOT / "benchmarks" / "reports"
BEGIN, END = "<!-- begin of the {}, written by `make docs` -->", "<!-- end of the {} -->"
NAMES = {"caltech": "Caltech-101", "grocery_store": "Grocery", "tiny_imagenet": "Tiny-ImageNet", "cifar10": "CIFAR-10"}
BACKBONES = {"deit_tiny_patch16_224": "DeiT-Ti", "vit_tiny_patch16_224": "ViT-Ti"}
METHODS = ("ours", "provisional", "slda", "ranpac", "ncm", "knn", "joint", "product-v1", "paper", "hat")
MAIN = ("main", "main-ours")  # 20 images per class; the second has the methods that the last changes concern
BY_IMAGES = ("few", "few-ours", *MAIN, "many", "many-ours")
EARLIER = "main-earlier"  # the suite with an earlier learner: methods that the present report does not have
FIGURES = {
    "last": "accuracy",
    "ai_auc": "AUC",
    "rejected": "known rejected",
    "flagged": "unknown flagged",
}
Rows = Mapping[tuple[str, int], Mapping[str, Any]]  # (data set, images per class) -> method -> mean figures


def reported(suites: Sequence[str]) -> Rows:
    """The mean figures of the suites' reports; of a method in several, those of the last."""
    rows: dict[tuple[str, int], Mapping[str, Any]] = {}
    for suite in suites:
        file = REPORTS / f"accuracy-{suite}.json"
        for name, methods in (json.loads(file.read_text())["results"] if file.is_file() else {}).items():
            data, _, text = name.partition(", ")
            key = data, int(text.split()[0])
            rows[key] = {**rows.get(key, {}), **{method: row["mean"] for method, row in methods.items()}}
    return rows


def figures() -> str:
    """Two tables: ours by the number of images per class, and all methods with 20."""
    by_images = reported(BY_IMAGES)
    lines = ["| data set | images per class | " + " | ".join(FIGURES.values()) + " |"]
    lines.append("| --- | ---: |" + " ---: |" * len(FIGURES))
    for data, title in NAMES.items():
        for own, per_class in sorted(key for key in by_images if key[0] == data):
            shown = " | ".join(_percent(by_images[own, per_class]["ours"][figure]) for figure in FIGURES)
            lines.append(f"| {title} | {per_class} | {shown} |")
    main, earlier = reported(MAIN), reported((EARLIER,))
    lines += ["", "| method | " + " | ".join(f"{NAMES[data]} accuracy / AUC" for data, _ in main) + " | mean |"]
    lines.append("| --- |" + " ---: |" * (len(main) + 1))
    for method in METHODS:
        measured = all(method in row for row in main.values())
        rows = [(main if measured else earlier)[key] for key in main]
        pairs = [(row[method]["last"], row[method]["ai_auc"]) for row in rows if method in row]
        if len(pairs) == len(main):
            pairs.append((sum(a for a, _ in pairs) / len(pairs), sum(b for _, b in pairs) / len(pairs)))
            shown = " | ".join(f"{_percent(accuracy)} / {_percent(auc)}" for accuracy, auc in pairs)
            lines.append(f"| `{method}`{'' if measured else ' (earlier)'} | {shown} |")
    return "\n".join(lines)


def refining() -> str:
    """One table: accuracy and AUC before and after a task's network is learned, and with the preset `paper`."""
    rows = reported(BY_IMAGES)
    lines = ["| data set | images per class | provisional | refined | `paper` | seconds per task: refined, `paper` |"]
    lines.append("| --- | ---: |" + " ---: |" * 4)
    for data, title in NAMES.items():
        for own, per_class in sorted(key for key in rows if key[0] == data):
            methods = [rows[own, per_class][name] for name in ("provisional", "ours", "paper")]
            pairs = " | ".join(f"{_percent(one['last'])} / {_percent(one['ai_auc'])}" for one in methods)
            seconds = ", ".join(f"{one['seconds']:.1f}" for one in methods[1:])
            lines.append(f"| {title} | {per_class} | {pairs} | {seconds} |")
    return "\n".join(lines)


def adapted_blocks() -> str:
    """One table: how many blocks of a transformer to adapt, by the number of images per class."""
    rows = json.loads((REPORTS / "adapted-blocks.json").read_text())["rows"]
    lines = ["| backbone | images per class | adapted blocks | closed form | network alone | both | seconds |"]
    lines.append("| --- | ---: | ---: |" + " ---: |" * 4)
    order = ("norms", "1", "2", "4", "12")
    for row in sorted(rows, key=lambda row: (row["backbone"], row["images"], order.index(row["blocks"]))):
        shown = " | ".join(str(row[name]) for name in ("images", "blocks", "closed form", "network", "both", "seconds"))
        lines.append(f"| {BACKBONES[row['backbone']]} | {shown} |")
    return "\n".join(lines)


TABLES = {"figures": figures, "table of refining": refining, "table of adapted blocks": adapted_blocks}


def updated(page: str) -> str:
    """The page with the figures of the reports as they are now."""
    for name, table in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{table()}\n\n{end}{after}"
    return page


def plot(path: Path) -> None:
    """Accuracy, AUC and the share of flagged unknown images by the number of images per class."""
    rows = reported(BY_IMAGES)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for axis, (name, title) in zip(
        axes,
        (("last", "accuracy after the last task"), ("ai_auc", "AUC"), ("flagged", "unknown images flagged")),
        strict=True,
    ):
        for data, label in NAMES.items():
            points = sorted((key[1], 100 * row["ours"][name]) for key, row in rows.items() if key[0] == data)
            axis.plot(*zip(*points, strict=True), "o-", label=label)
        least = 0 if name == "flagged" else 40
        axis.set(title=f"{title}, %", xlabel="images per class", xscale="log", ylim=(least, 100))
        axis.set_xticks([5, 10, 20, 50], ["5", "10", "20", "50"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
    plot(PLOT)
