"""Follow a task over server-sent events, and print a line whenever it changes. Standard library only.

    python examples/watch_task.py <task id>

The server sends one event per change and closes the stream when the task has ended, or when the server itself stops;
in the second case the script connects again. Exit code 0: published; 1: rejected, failed or cancelled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

ENDED = ("published", "rejected", "failed", "cancelled")
SILENCE = 60  # seconds; the server sends a comment at least every 15


def events(url: str, key: str | None) -> Iterator[dict[str, Any]]:
    """The data of each event of one connection. Lines that start with a colon are comments."""
    headers = {"Accept": "text/event-stream"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SILENCE) as response:
        for line in response:
            if line.startswith(b"data:"):
                yield json.loads(line.removeprefix(b"data:"))


def describe(task: dict[str, Any]) -> str:
    progress = task["progress"]
    if task["state"] in ("learning", "evaluating") and progress is not None:
        return f"{task['state']}: {progress['phase']}, {progress['progress']:.0%}"
    if task["state"] == "published":
        return f"published as version {task['version']}"
    return f"{task['state']}: {task['reason']}" if task["reason"] else str(task["state"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Follow a task until it has ended.")
    parser.add_argument("task", help="the id that POST /tasks returned")
    parser.add_argument("--url", default=os.environ.get("OPENWORLD_URL", "http://127.0.0.1:8000"))
    arguments = parser.parse_args()
    while True:
        try:
            for task in events(f"{arguments.url}/tasks/{arguments.task}/events", os.environ.get("OPENWORLD_KEY")):
                print(describe(task), flush=True)
                if task["state"] in ENDED:
                    return 0 if task["state"] == "published" else 1
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                sys.exit(f"the server refused: {json.load(error)['detail']}")
        except OSError as error:
            print(f"connection lost ({error}); connecting again", file=sys.stderr, flush=True)
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
