"""What the product promises, checked with the figures of a suite. Points are hundredths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Rows = Mapping[str, Mapping[str, Any]]  # method -> what was measured
# (figure, other method): least mean lead of ours over all data sets, in points
LEADS = {
    ("ai_auc", "product-v1"): 4.0,
    **{("ai_auc", other): 2.0 for other in ("paper", "slda", "ranpac")},
    **{("last", other): 1.0 for other in ("product-v1", "paper", "slda", "ranpac")},
}
NO_RIVALS = ("joint", "provisional")  # an upper bound that sees all classes at once, and a part of ours
NAMES = {"last": "last accuracy", "ai_auc": "AI-AUC"}
ASKED_REJECTION = 0.05  # the threshold accepts 95 % of known images
LARGEST_REJECTION_ERROR = 1.5  # on each data set, in the mean over tasks
LARGEST_REJECTION_ERROR_OF_A_TASK = 4.0  # on each data set after each task, in the mean over class orders
LARGEST_SELF_REPORT_ERROR = 2.0  # in the mean over data sets
LARGEST_DEFICIT = 0.5  # on any data set, unless the interval of the difference contains 0
LEAST_FLAGGED_RATIO = 1.5  # of novel images, against product-v1


def acceptance(table: Mapping[tuple[str, int], Rows], compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The checks that the measured methods allow: a sentence with figures, and whether it is met."""
    checks = []
    for (figure, other), least in LEADS.items():
        leads = [
            100 * (rows["ours"]["mean"][figure] - rows[other]["mean"][figure])
            for rows in table.values()
            if "ours" in rows and other in rows
        ]
        if leads:
            lead = float(np.mean(leads))
            checks.append(_check(f"{NAMES[figure]} ours - {other}: {lead:+.1f} (bar {least:+g})", lead >= least))
    checks += _first(table)
    for figure in NAMES:
        own = [entry for entry in compared if entry["figure"] == figure]
        if own:
            worst = min(own, key=lambda entry: float(entry["difference"]))
            lead = 100 * worst["difference"]
            where = f"on {worst['data']}, {worst['per_class']} images per class"
            text = f"{NAMES[figure]} ours - best other, least lead: {lead:+.1f} {where} (bar {-LARGEST_DEFICIT:g})"
            behind = [entry for entry in own if 100 * entry["difference"] < -LARGEST_DEFICIT and entry["high"] < 0]
            checks.append(_check(text, not behind))
    checks += _rejection(table)
    ratios = [(_figure(rows, "ours", "flagged"), _figure(rows, "product-v1", "flagged")) for rows in table.values()]
    pairs = [(own, old) for own, old in ratios if own is not None and old is not None]
    if pairs:
        ratio = sum(own for own, _ in pairs) / max(sum(old for _, old in pairs), 1e-9)
        text = f"share of novel images flagged, ours / product-v1: {ratio:.2f} (bar {LEAST_FLAGGED_RATIO:g})"
        checks.append(_check(text, ratio >= LEAST_FLAGGED_RATIO))
    for what, reported, measured in (
        ("accuracy", "self_accuracy", "last"),
        ("novelty AUC", "self_auc", "auc_where_reported"),
    ):
        gaps = [
            100 * (claimed - true)
            for rows in table.values()
            if (claimed := _figure(rows, "ours", reported)) is not None
            and (true := _figure(rows, "ours", measured)) is not None
        ]
        if gaps:
            gap = float(np.mean(gaps))
            text = f"self-reported - measured {what}, mean: {gap:+.1f} (bar {LARGEST_SELF_REPORT_ERROR:g})"
            checks.append(_check(text, abs(gap) <= LARGEST_SELF_REPORT_ERROR))
    return checks


def _figure(rows: Rows, method: str, name: str) -> float | None:
    value = rows[method]["mean"].get(name) if method in rows else None
    return None if value is None else float(value)


def _first(table: Mapping[tuple[str, int], Rows]) -> list[dict[str, Any]]:
    """Ours against every method that was measured on all data sets, in the mean over them."""
    if not table or not all("ours" in rows for rows in table.values()):
        return []
    checks = []
    for figure, name in NAMES.items():
        means = {
            method: 100 * float(np.mean([rows[method]["mean"][figure] for rows in table.values()]))
            for method in set.intersection(*(set(rows) for rows in table.values())) - {*NO_RIVALS}
        }
        ours = means.pop("ours")
        if means:
            best = max(means, key=lambda method: means[method])
            text = f"{name}, mean over data sets: ours {ours:.1f}, then {best} {means[best]:.1f} (bar: ours is first)"
            checks.append(_check(text, ours > means[best]))
    return checks


def _rejection(table: Mapping[tuple[str, int], Rows]) -> list[dict[str, Any]]:
    """Ours where the share of rejected known images is farthest from what was asked: over all tasks, after one task."""
    over_tasks: dict[str, float] = {}
    after_one: dict[str, float] = {}
    for (data, per_class), rows in table.items():
        if "ours" in rows:
            where = f"{data}, {per_class} images per class"
            shares = np.array([result["rejected"] for result in rows["ours"]["results"]], np.float64).mean(axis=0)
            over_tasks[where] = float(shares.mean())
            after_one |= {f"{where}, after task {number}": float(share) for number, share in enumerate(shares, 1)}
    checks = []
    for shares, bar in ((over_tasks, LARGEST_REJECTION_ERROR), (after_one, LARGEST_REJECTION_ERROR_OF_A_TASK)):
        if shares:
            where = max(shares, key=lambda name: abs(shares[name] - ASKED_REJECTION))
            text = f"known images rejected, farthest from 5 %: {100 * shares[where]:.1f} % on {where} (bar +-{bar:g})"
            checks.append(_check(text, 100 * abs(shares[where] - ASKED_REJECTION) <= bar))
    return checks


def _check(text: str, met: bool) -> dict[str, Any]:
    return {"text": text, "met": met}
