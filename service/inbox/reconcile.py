"""Rows and bytes that a kill, or somebody's hand, has parted from each other."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from models.files import TEMPORARY
from service.inbox.rows import Entry
from service.inbox.table import InboxTable

_OURS = re.compile(rf"[0-9a-f]{{64}}|\..*{re.escape(TEMPORARY)}")


def reconciled(table: InboxTable, images: Path) -> Iterator[Entry]:
    """The rows that have their bytes, in the order in which they came; then rows and bytes that are alone go."""
    files = {path.name: path for path in images.glob("*/*") if _OURS.fullmatch(path.name)}
    lost = []
    for entry in table.entries():
        if files.pop(entry.id, None) is None:
            lost.append(entry.id)
        else:
            yield entry
    table.delete(lost)
    for orphan in files.values():
        orphan.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            orphan.parent.rmdir()
