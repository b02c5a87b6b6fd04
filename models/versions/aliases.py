"""What people call a class by now: a class that was merged answers as another one, a retired one not at all.

Training goes on with the classes as they were learned, so that every edit can be taken back.
"""

from __future__ import annotations

from collections.abc import Mapping

Aliases = Mapping[str, str | None]  # merged class -> the class it went into; retired class -> None


def label_of(name: str, aliases: Aliases) -> str | None:
    """What a class is answered as. A class merged into one that was retired later is retired with it."""
    label: str | None = name
    while label is not None and label in aliases:
        label = aliases[label]
    return label
