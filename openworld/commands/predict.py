"""`openworld predict`: say for each image which class it is and how sure that is, or that it was never seen."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.text import Text

from models.errors import ImageError, NothingLearned
from models.inference.answer import Answer
from models.versions.store import VersionStore
from openworld import remote, tables
from openworld.commands import open_data
from openworld.progress import count_done
from service.wire.predictions import in_words

if TYPE_CHECKING:
    from models.inference.predictor import Predictor

SUMMARY = "classify images: a learned class, or never seen"
EPILOG = """\
examples:
  openworld predict photo.jpg --data robot
  openworld predict inbox/ --json | jq -r 'select(.novel) | .file'    every image of a folder; the novel ones
  openworld predict photo.jpg --version 3                             an earlier version
  openworld predict photo.jpg --url http://robot:8000                 ask a service; the key is in OPENWORLD_KEY

The answer comes from the service or the data folder that is named, by the first of --url, --data, OPENWORLD_URL and
OPENWORLD_DATA that is given; else from a service on this machine, when one is running; else from the folder ./data.
An answer is sure (at least 70 % for one class), unsure (less; a second class is named) or never seen (none of
the learned classes). The scores behind it are in --json.
Exit code 1: at least one file could not be read; the others have their answer.
"""
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
FILES_IN_MEMORY = 64
SOME_FAILED = 1
STYLES = {"sure": "green", "unsure": "yellow", "novel": "cyan"}


class AnyPredictor(Protocol):
    """A data folder or a service."""

    @property
    def version(self) -> int: ...

    def predict(self, images: Sequence[bytes]) -> list[Answer | ImageError]: ...


Result = tuple[Path, Answer | str]  # a file with its answer, or with the reason why there is none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JPEG, PNG or WebP; a folder: all images in it"
    )
    parser.add_argument("--version", type=int, metavar="N", help="a version's number (default: the current one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per file, one per line")
    remote.add_arguments(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")


def run(arguments: argparse.Namespace) -> int:
    url = remote.find_service(arguments)
    if url is None:
        return _predict(arguments, _open_folder(arguments), "")
    with remote.connect(url) as client:
        return _predict(arguments, remote.RemotePredictor(client, arguments.version), f" of {url}")


def _open_folder(arguments: argparse.Namespace) -> Predictor:
    store = VersionStore(open_data(arguments, read_only=True))
    version = store.current() if arguments.version is None else arguments.version
    if version is None:
        raise NothingLearned(f"nothing is learned yet. Start with: openworld learn FOLDER --data {store.root}")
    if version not in (existing := store.versions()):
        raise NothingLearned(
            f"there is no version {version} in {store.storage.location('')}, "
            f"only {', '.join(map(str, existing)) or 'none'}"
        )
    # Imported here: a mistyped command fails before ONNX Runtime loads.
    from models.inference.predictor import Predictor

    return Predictor.open(store.storage, version, arguments.device)


def _predict(arguments: argparse.Namespace, predictor: AnyPredictor, source: str) -> int:
    version = predictor.version
    failed = 0
    rows: list[Sequence[str | Text]] = []
    with count_done("images") as done:
        for path, answer in _answers(predictor, arguments.files):
            failed += isinstance(answer, str)
            done(1)
            if arguments.json:
                print(json.dumps(_document(path, answer, version)))
            else:
                rows.append(_row(path, answer))
    if not arguments.json:
        tables.console().print(tables.table(["file", "answer"], rows, title=f"version {version}{source}"))
    return SOME_FAILED if failed else 0


def _answers(predictor: AnyPredictor, given: Sequence[Path]) -> Iterator[Result]:
    """In the order given; at most FILES_IN_MEMORY files are in memory."""
    unread = _files(given)
    while files := list(islice(unread, FILES_IN_MEMORY)):
        answers = iter(predictor.predict([data for _, data in files if isinstance(data, bytes)]))
        for path, data in files:
            answer = data if isinstance(data, str) else next(answers)
            yield path, answer if isinstance(answer, Answer) else str(answer)


def _files(given: Sequence[Path]) -> Iterator[tuple[Path, bytes | str]]:
    """Each file with its bytes, or with the reason why it cannot be read."""
    for path in given:
        try:
            if not path.is_dir():
                yield path, path.read_bytes()
                continue
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
            if not inside:
                yield path, "no JPEG, PNG or WebP in this folder"
        except OSError as error:
            yield path, error.strerror or str(error)
            continue
        yield from _files([p for p in inside if not p.is_dir()])


def _document(path: Path, answer: Answer | str, version: int) -> dict[str, Any]:
    found = {"error": answer} if isinstance(answer, str) else answer.to_dict()
    return {"file": os.fspath(path), "version": version, **found}


def _row(path: Path, answer: Answer | str) -> list[str | Text]:
    # A file name that is not UTF-8 can be opened, but not printed.
    name = os.fsencode(path).decode(errors="replace")
    if isinstance(answer, str):
        return [name, Text(f"error: {answer}", style="red")]
    words = in_words(answer.certainty, answer.label, answer.nearest, answer.p_novel)
    return [name, Text(words, style=STYLES[answer.certainty])]
