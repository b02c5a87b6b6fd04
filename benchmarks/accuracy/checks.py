"""What the product promises, checked with the figures of a suite. Points are hundredths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Rows = Mapping[str, Mapping[str, Any]]  # method -> what was measured
LEADS = {
    # (figure, other method): least mean lead of ours over all data sets, in points
    ("last", "paper"): 2.0,
    ("ai_auc", "paper"): 2.0,
    ("last", "product-v1"): 0.0,
    ("ai_auc", "product-v1"): 0.0,
}
NAMES = {"last": "last accuracy", "ai_auc": "AI-AUC"}
ASKED_REJECTION = 0.05  # the threshold accepts 95 % of known images
LARGEST_REJECTION_ERROR = 3.0
LARGEST_SELF_REPORT_ERROR = 5.0
LARGEST_CALIBRATION_ERROR = 10.0


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
    for figure in NAMES:
        own = [entry for entry in compared if entry["figure"] == figure]
        if own:
            worst = min(own, key=lambda entry: float(entry["difference"]))
            lead = 100 * worst["difference"]
            where = f"on {worst['data']}, {worst['per_class']} images per class"
            text = f"{NAMES[figure]} ours - best other, least lead: {lead:+.1f} {where} (bar +0)"
            checks.append(_check(text, lead >= 0))
    checks += _largest(
        table,
        "share of known images rejected, distance from 5 %",
        LARGEST_REJECTION_ERROR,
        lambda mean: abs(mean["rejected"] - ASKED_REJECTION),
    )
    checks += _largest(
        table,
        "self-reported - measured accuracy",
        LARGEST_SELF_REPORT_ERROR,
        lambda mean: abs(mean["self_accuracy"] - mean["last"]),
    )
    checks += _largest(
        table,
        "self-reported - measured novelty AUC",
        LARGEST_SELF_REPORT_ERROR,
        lambda mean: abs(mean["self_auc"] - mean["auc_where_reported"]),
    )
    checks += _largest(table, "calibration error of p_novel", LARGEST_CALIBRATION_ERROR, lambda mean: mean["ece"])
    return checks


def _largest(
    table: Mapping[tuple[str, int], Rows], what: str, bar: float, error: Callable[[Mapping[str, float]], float]
) -> list[dict[str, Any]]:
    """Ours on the data set where the error is largest."""
    errors = {}
    for (data, per_class), rows in table.items():
        if "ours" in rows:
            try:
                errors[f"{data}, {per_class} images per class"] = 100 * error(rows["ours"]["mean"])
            except TypeError:  # a figure that is not defined there, such as an AUC without unknown classes
                continue
    if not errors:
        return []
    where = max(errors, key=lambda name: errors[name])
    return [_check(f"{what}, largest: {errors[where]:.1f} on {where} (bar {bar:g})", errors[where] <= bar)]


def _check(text: str, met: bool) -> dict[str, Any]:
    return {"text": text, "met": met}
