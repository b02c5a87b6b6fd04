"""Predict all images of a folder and write one CSV row per image.

    python examples/predict_folder.py photos/ answers.csv
    OPENWORLD_KEY=... python examples/predict_folder.py photos/ answers.csv --url https://robots.example:8000

The column `answer` is for people ("unsure: looks like pear (54 %), apple (31 %)"), `certainty` and `label` are for
programs; `looks_like` and `share` are the most similar class, also of an image that was never seen.
An image that cannot be read has its problem in the column `error`; the other images are answered. Exit code 1 says
that there is at least one such row.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path

from service.client import ApiError, Client, Failure, Prediction

ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}
IMAGES_PER_REQUEST = 16  # several images per request save round trips; the server accepts 64 by default
COLUMNS = ("file", "answer", "certainty", "label", "looks_like", "share", "version", "error")


def predict(client: Client, paths: list[Path]) -> list[Prediction | str]:
    """One answer per file, or the code of its problem."""
    try:
        answers = client.predict_many(paths)
    except ApiError as error:
        if error.status not in (413, 415, 422):
            raise
        # No image of the request could be read, or the request is too large as a whole: try each image alone.
        return [error.code] if len(paths) == 1 else [answer for path in paths for answer in predict(client, [path])]
    return [answer.error.code if isinstance(answer, Failure) else answer for answer in answers]


def row(name: str, answer: Prediction | str) -> dict[str, str]:
    if isinstance(answer, str):
        return {"file": name, "error": answer}
    return {
        "file": name,
        "answer": answer.in_words(),
        "certainty": answer.certainty,
        "label": answer.label or "",
        "looks_like": answer.nearest[0].label if answer.nearest else "",
        "share": f"{answer.nearest[0].share:.2f}" if answer.nearest else "",
        "version": str(answer.version),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Predict all images of a folder into a CSV file.")
    parser.add_argument("folder", type=Path, help="searched with its sub-folders")
    parser.add_argument("csv", type=Path, help="the file to write")
    parser.add_argument("--url", default=os.environ.get("OPENWORLD_URL", "http://127.0.0.1:8000"))
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not paths:
        sys.exit(f"no JPEG, PNG or WebP files in '{arguments.folder}'")
    failed = 0
    with (
        Client(arguments.url, os.environ.get("OPENWORLD_KEY")) as client,
        arguments.csv.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for start in range(0, len(paths), IMAGES_PER_REQUEST):
            chunk = paths[start : start + IMAGES_PER_REQUEST]
            for path, answer in zip(chunk, predict(client, chunk), strict=True):
                failed += isinstance(answer, str)
                writer.writerow(row(str(path.relative_to(arguments.folder)), answer))
    print(f"{len(paths)} images, {failed} of them unreadable, written to {arguments.csv}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
