"""Checks of the inbox: rows and images agree. The server that owns the inbox may run."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from models.errors import StoreError
from openworld.check.report import Finding, Report
from service.inbox.snapshot import novelty_sizes, read_snapshot
from tasks.images import ImageStore


def check_inbox(root: Path, report: Report, *, hash_images: bool) -> Iterator[Finding]:
    folder = root / "inbox"
    database, images = folder / "inbox.sqlite3", ImageStore(folder)
    files = {image.sha256 for image in images}
    rows: dict[str, int] = {}
    if database.exists():
        try:
            with read_snapshot(database) as connection:
                if connection.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                    yield Finding("inbox_damaged", "inbox/inbox.sqlite3", "its pages are damaged: restore a backup")
                rows = novelty_sizes(connection)
        except (StoreError, sqlite3.Error) as error:
            yield Finding("inbox_damaged", "inbox/inbox.sqlite3", str(error))
            return
    report.checked["novelties"] = len(rows)
    for id in sorted(files - rows.keys()):
        yield Finding(
            "novelty_without_row", f"novelty {id}", "its image has no row: the next start of a server adds it"
        )
    for id in sorted(rows.keys() - files):
        yield Finding("novelty_without_image", f"novelty {id}", "its image is missing: the next start removes its row")
    for id in sorted(rows.keys() & files) if hash_images else ():
        try:
            size = len(images.read(id))
        except StoreError as error:
            yield Finding("novelty_damaged", f"novelty {id}", f"{error}; delete the novelty")
            continue
        if size != rows[id]:
            yield Finding("novelty_damaged", f"novelty {id}", f"it has {size} bytes, its row says {rows[id]}")
