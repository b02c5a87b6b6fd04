"""Reading a server's metrics from their text format."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(text: str) -> dict[str, Metric]:
    """By name; a counter by the name of its series, as it is written in a query."""
    found = text_string_to_metric_families(text)
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in found}


def series(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The values of one metric by the values of its labels, in the order of the labels' names."""
    samples = families(text)[name].samples
    return {tuple(value for _, value in sorted(one.labels.items())): one.value for one in samples}
