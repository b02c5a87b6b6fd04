"""What the product promises, checked with the figures of a suite. Points are hundredths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Rows = Mapping[str, Mapping[str, Any]]  # method -> what was measured
# (figure, other method): least mean lead of ours over all data sets, in points
LEADS = {
    ("ai_auc", "product-v1"): 4.0,
    **{("ai_auc", other): 2.0 for other in ("paper", "slda", "ranpac")},
    **{("last", other): 1.0 for other in ("product-v1", "paper", "slda", "ranpac")},
}
NAMES = {"last": "last accuracy", "ai_auc": "AI-AUC"}
ASKED_REJECTION = 0.05  # the threshold accepts 95 % of known images
LARGEST_REJECTION_ERROR = 1.5  # on each data set, in the mean over tasks
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
    for figure in NAMES:
        own = [entry for entry in compared if entry["figure"] == figure]
        if own:
            worst = min(own, key=lambda entry: float(entry["difference"]))
            lead = 100 * worst["difference"]
            where = f"on {worst['data']}, {worst['per_class']} images per class"
            text = f"{NAMES[figure]} ours - best other, least lead: {lead:+.1f} {where} (bar {-LARGEST_DEFICIT:g})"
            behind = [entry for entry in own if 100 * entry["difference"] < -LARGEST_DEFICIT and entry["high"] < 0]
            checks.append(_check(text, not behind))
    checks += _largest(
        table,
        "share of known images rejected, distance from 5 %",
        LARGEST_REJECTION_ERROR,
        lambda mean: abs(mean["rejected"] - ASKED_REJECTION),
    )
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
