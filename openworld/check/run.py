"""Run all checks of a data folder. Nothing is written.

A service may write while it is checked, so that a check can see a file before the entry that names it. A finding is
therefore reported only if it is found again, in every one of several passes.
"""

from __future__ import annotations

import time

from models.storage import DataFolder, storage_of
from openworld.check.files import check_files
from openworld.check.inbox import check_inbox
from openworld.check.queue import check_queue
from openworld.check.report import Check, Finding, Report
from openworld.check.statistics import check_statistics
from openworld.check.versions import check_versions
from tasks.queue import TaskQueue

PASSES = 3
PAUSE_SECONDS = 0.7  # between passes: longer than a promotion, or the change of an image and its row


def check_folder(folder: DataFolder, queue: TaskQueue | None, *, quick: bool = False) -> Report:
    """Check the data folder, and its tasks if there is a queue. `quick`: read no images."""
    storage = storage_of(folder)
    report = Report(storage.location(""))
    checks: list[Check] = [
        lambda: check_versions(storage, queue, report),
        lambda: check_files(storage, queue, report, hash_images=not quick),
        lambda: check_inbox(storage.root, report, hash_images=not quick),
    ]
    if queue is not None:
        checks.append(lambda: check_queue(storage, queue, report))
    for check in checks:
        report.add(_lasting(check))
    if quick:
        report.skipped["statistics"] = "--quick"
    else:
        report.add(_lasting(lambda: check_statistics(storage, report)))
    return report


def _lasting(check: Check) -> list[Finding]:
    """The findings of every pass; most checks need one pass only."""
    found = {finding.identity: finding for finding in check()}
    for _ in range(PASSES - 1):
        if not any(not finding.note for finding in found.values()):
            break
        time.sleep(PAUSE_SECONDS)
        again = {finding.identity for finding in check()}
        found = {identity: finding for identity, finding in found.items() if identity in again}
    return list(found.values())
