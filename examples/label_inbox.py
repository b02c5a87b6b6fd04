"""Label novel images with a file manager, or with a program of your own.

    python examples/label_inbox.py export novel/    writes the inbox to novel/group-1/, novel/group-2/, ...
    mv novel/group-1 novel/kiwi                     name the groups; delete the images that do not belong
    python examples/label_inbox.py submit novel/    submits the named folders as one batch

The service groups novelties that look alike. Folders that are still called group-<number> are not submitted. The file
names are the ids of the novelties, so keep them.
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.request
from pathlib import Path

from service.client import Client

FORMATS = {"image/jpeg": ".jpg", "image/png": ".png", "image/webp": ".webp"}


def export(client: Client, url: str, folder: Path, minimum: int) -> None:
    groups: dict[str, list[str]] = {}
    for novelty in client.novelties():
        groups.setdefault(novelty.group or novelty.id, []).append(novelty.id)
    large = sorted((ids for ids in groups.values() if len(ids) >= minimum), key=len, reverse=True)
    for number, ids in enumerate(large, start=1):
        target = folder / f"group-{number}"
        target.mkdir(parents=True, exist_ok=True)
        for id in ids:
            data, ending = download(f"{url}/novelties/{id}/image")
            (target / f"{id}{ending}").write_bytes(data)
        print(f"{target}: {len(ids)} images")
    print(f"{len(large)} groups with at least {minimum} images; {len(groups) - len(large)} smaller ones left out")


def download(address: str) -> tuple[bytes, str]:
    """An image of the inbox and the ending of its file; the client has no method for it, an HTTP request has."""
    key = os.environ.get("OPENWORLD_KEY")
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read(), FORMATS.get(response.headers.get_content_type(), "")


def submit(client: Client, folder: Path) -> None:
    named = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith("group-")]
    labels = {path.name: [file.stem for file in sorted(path.iterdir())] for path in named}
    if not labels:
        sys.exit(f"no named folders in '{folder}': rename those that you want to teach")
    task = client.teach(labels)
    print(f"task {task.id}: {', '.join(f'{name} ({count})' for name, count in sorted(task.counts.items()))}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Label novel images by moving files.")
    parser.add_argument("action", choices=("export", "submit"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minimum", type=int, default=5, help="images of a group that is exported (default 5)")
    parser.add_argument("--url", default=os.environ.get("OPENWORLD_URL", "http://127.0.0.1:8000"))
    arguments = parser.parse_args()
    with Client(arguments.url, os.environ.get("OPENWORLD_KEY")) as client:
        if arguments.action == "export":
            export(client, arguments.url, arguments.folder, arguments.minimum)
        else:
            submit(client, arguments.folder)


if __name__ == "__main__":
    main()
