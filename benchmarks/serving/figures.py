"""The result of one measurement: throughput, latency percentiles and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


def percentile(values: Sequence[float], share: float) -> float:
    """Linearly interpolated percentile; NaN for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class Measured:
    """One measurement window of one contender under one load."""

    images: int  # answered with 200 inside the window
    seconds: float
    images_per_second: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    slowest_ms: float
    answered: int = 0  # responses with 200, including those outside the window
    wrong: int = 0  # answered with an unexpected label
    errors: dict[str, int] = field(default_factory=dict)  # status or error name: count

    @classmethod
    def of(cls, latencies: Sequence[float], seconds: float, **rest: Any) -> Measured:
        """`latencies` in seconds, of the images answered in a window of `seconds`."""
        p50, p90, p99, slowest = (round(1000 * percentile(latencies, share), 3) for share in (0.5, 0.9, 0.99, 1.0))
        rate = round(len(latencies) / seconds, 2)
        return cls(len(latencies), round(seconds, 3), rate, p50, p90, p99, slowest, **rest)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every number that all rounds have, with the same nesting."""
    out: dict[str, Any] = {}
    for key in rounds[0] if rounds else ():
        values = [entry[key] for entry in rounds if key in entry]
        if len(values) < len(rounds):
            continue
        if all(isinstance(value, Mapping) for value in values):
            out[key] = medians(values)
        elif all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            out[key] = round(median(values), 4)
    return out
