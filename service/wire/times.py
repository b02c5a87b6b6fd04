"""Times of the API: with a time zone, always UTC."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_time(seconds: float) -> datetime:
    """From seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)
