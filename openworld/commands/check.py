"""`openworld check`: examine a data folder and its queue, and report everything that is wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from openworld.commands import require_data, require_packages
from openworld.environment import settings_from
from openworld.tables import count
from tasks.settings import ProgramSettings

SUMMARY = "examine a data folder and its queue; safe beside a running service"
EPILOG = """\
examples:
  openworld check --data robot
  openworld check --data robot --json | jq '.problems[].message'
  OPENWORLD_REDIS_URL=redis://10.0.0.7:6379 openworld check --data robot

Checked: every accepted task ended exactly once, every version loads and verifies, CURRENT and the log of promotions
agree, no file is orphaned or left behind, the inbox and its images agree, and the statistics of the current version
equal those recomputed from its images. Nothing is written. The queue is that of OPENWORLD_REDIS_URL, else the
one that `openworld up` has started in the data folder; without either, tasks are not checked.

Exit code: 0 nothing is wrong, 1 there are problems, 2 the check could not run. Notes do not count as problems.
"""

PROBLEMS = 1
NOUNS = {
    "versions": "version",
    "rejected": "rejected version",
    "images": "image",
    "novelties": "novel image",
    "tasks": "task",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="do not read images, nor recompute statistics from them")
    parser.add_argument(
        "--redis-url", metavar="URL", help="redis://host:port or unix:///path (default: OPENWORLD_REDIS_URL)"
    )


def run(arguments: argparse.Namespace) -> int:
    require_packages("serve", "numpy", "PIL", "safetensors", "onnxruntime", "redis")
    settings = settings_from(ProgramSettings, {"data": arguments.data, "redis_url": arguments.redis_url})
    require_data(settings)
    # Imported here: the parser of the other commands needs none of it.
    from openworld.check import check_folder
    from openworld.queues import running_queue

    # With copies of its own: what is in the object store is checked, not what this machine has of it.
    with TemporaryDirectory() as copies:
        storage = settings.open_storage(copies=Path(copies), test=False)
        with running_queue(settings, storage) as queue:
            report = check_folder(storage, queue, quick=arguments.quick)
    if queue is None:
        report.skipped["tasks"] = "no queue: set OPENWORLD_REDIS_URL, or start `openworld up`"
    if arguments.json:
        print(json.dumps(report.to_dict(), ensure_ascii=False))
        return 0 if report.ok else PROBLEMS
    for finding in report.problems:
        print(f"problem: {finding.subject}: {finding.message} [{finding.code}]")
    for finding in report.notes:
        print(f"note: {finding.subject}: {finding.message} [{finding.code}]")
    for what, why in report.skipped.items():
        print(f"not checked: {what}: {why}")
    verdict = "nothing is wrong" if report.ok else count(len(report.problems), "problem")
    print(f"{storage.location('')}: {verdict}; checked: {_in_words(report.checked)}")
    return 0 if report.ok else PROBLEMS


def _in_words(checked: Mapping[str, int]) -> str:
    """What was checked. Classes without images to recompute their statistics from are among the skipped."""
    parts = [count(checked[what], noun) for what, noun in NOUNS.items() if what in checked]
    if classes := checked.get("classes"):
        parts.append(f"the statistics of {classes} {'class' if classes == 1 else 'classes'}")
    return ", ".join(parts)
