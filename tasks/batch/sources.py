"""Where a batch comes from: a folder with a sub-folder a class, or a zip of one.

A source is listed first and read afterwards, so that a zip bomb or a batch over the limits is refused by its table of
contents. Nothing is ever unpacked to disk: a member's name is only ever a label and a text in a message.
"""

import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tasks.batch.check import DEFAULT_LIMITS, BatchCheck, BatchLimits, LabelledBatch, shortened
from tasks.batch.class_names import shown
from tasks.errors import BatchError

LAYOUT = "give a folder with a sub-folder a class (cat/1.jpg, dog/2.jpg), or a zip of it"

# Images hardly compress, so a member that shrank a hundredfold is not one; small flat drawings may, and do no harm.
MAX_RATIO = 100
RATIO_MATTERS_FROM = 1024**2
# macOS adds a twin to every file, and folders are members too.
MEMBERS_PER_IMAGE = 4

_CLUTTER = {"__macosx", "thumbs.db", "desktop.ini"}
# The other methods let a small member expand without bound while it is read.
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
_UTF8_NAME = 0x800
_ENCRYPTED = 0x1
_ZIP_ERRORS = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, zlib.error, struct.error, OverflowError)


@dataclass(frozen=True)
class Member:
    """A file or a folder of a source, by its path inside it; a file with no `handle` must not be read."""

    parts: tuple[str, ...]
    is_folder: bool
    size: int = 0
    handle: Path | zipfile.ZipInfo | None = None

    @property
    def origin(self) -> str:
        return "/".join(self.parts)


@dataclass
class Source:
    """A listed source: its classes (also the empty ones), its image files and the problems of its layout.

    Iterating reads the files, one at a time: `(label, origin, data)`; a file that fails raises `OSError`.
    """

    members: list[Member] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    archive: zipfile.ZipFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.archive is not None:
            self.archive.close()

    def __iter__(self) -> Iterator[tuple[str, str, bytes]]:
        for member in self.members:
            if member.handle is not None:
                yield member.parts[-2], member.origin, self.read(member)

    def read(self, member: Member) -> bytes:
        if isinstance(member.handle, Path):
            return member.handle.read_bytes()
        if self.archive is None or member.handle is None:
            raise OSError("refused")
        try:
            return self.archive.read(member.handle)
        except _ZIP_ERRORS as error:
            raise OSError(f"damaged inside the zip: {error}") from error


def load_batch(path: Path, known_classes: Collection[str] = (), limits: BatchLimits = DEFAULT_LIMITS) -> LabelledBatch:
    """The checked batch of a folder or a zip, or one `BatchError` with the problems of both layout and content."""
    check = BatchCheck(known_classes, limits)
    with read_source(path, limits) as source:
        for line in source.problems:
            check.problem(line)
        for label in source.classes:
            check.declare(label)
        size = sum(member.size for member in source.members)
        too_much = len(source.members) > limits.max_images or size > limits.max_bytes
        for member in source.members:
            label = member.parts[-2]
            if too_much or member.handle is None:
                check.skip(label, member.size)
                continue
            try:
                data = source.read(member)
            except OSError as error:
                check.unreadable(label, member.origin, _reason(error))
            else:
                check.add(label, member.origin, data)
    return check.finish()


def read_source(path: Path, limits: BatchLimits = DEFAULT_LIMITS) -> Source:
    """List a folder or a zip (close it, or use `with`); `BatchError` when the path is neither."""
    name = shown(str(path))
    try:
        if path.is_dir():
            return _list_folder(path)
        if not path.exists():
            raise BatchError([f"{name} does not exist: {LAYOUT}"])
        if not path.is_file():
            raise BatchError([f"{name} is neither a folder nor a file: {LAYOUT}"])
        if zipfile.is_zipfile(path):
            return _list_zip(path, limits)
    except (OSError, ValueError) as error:
        raise BatchError([f"{name} cannot be opened ({_reason(error)}): check the path and its rights"]) from error
    if path.suffix.lower() == ".zip":
        raise BatchError([f"{name} is a broken zip, or none at all: zip the folder again and copy it whole"])
    raise BatchError([f"{name} is a file, but not a zip: {LAYOUT}"])


def _list_folder(root: Path) -> Source:
    """Two levels, never deeper: links are followed, and still no cycle of them can hold us."""
    members: list[Member] = []
    broken: list[str] = []

    def visit(folder: Path, above: tuple[str, ...]) -> None:
        for name in sorted(os.listdir(folder)):
            if _is_clutter(name):
                continue
            path, parts = folder / name, (*above, name)
            try:
                status = path.stat()
                if stat.S_ISDIR(status.st_mode):
                    if not above:
                        visit(path, parts)
                    members.append(Member(parts, is_folder=True))
                elif stat.S_ISREG(status.st_mode):
                    members.append(Member(parts, is_folder=False, size=status.st_size, handle=path))
                else:
                    broken.append(f"{shown('/'.join(parts))} is neither a file nor a folder: remove it")
            except OSError as error:
                remedy = "mend the link or its rights, or remove it"
                broken.append(f"{shown('/'.join(parts))} cannot be opened ({_reason(error)}): {remedy}")

    visit(root, ())
    return _arrange(members, shown(str(root)), shortened(broken, "entries that cannot be opened: mend or remove them"))


def _list_zip(path: Path, limits: BatchLimits) -> Source:
    name = shown(str(path))
    try:
        archive = zipfile.ZipFile(path)
    except _ZIP_ERRORS as error:
        raise BatchError(
            [f"{name} is a broken zip ({_reason(error)}): zip the folder again and copy it whole"]
        ) from error
    try:
        infos = archive.infolist()
        most = MEMBERS_PER_IMAGE * limits.max_images
        if len(infos) > most:
            raise BatchError([f"{name} has {len(infos)} members, more than {most}: split the batch"])
        members: list[Member] = []
        problems: list[str] = []
        for info in infos:
            text = _member_name(info)
            parts = tuple(part for part in text.split("/") if part not in ("", "."))
            if text.startswith("/") or re.match(r"[A-Za-z]:", text) or ".." in parts or "\0" in text:
                problems.append(f"{shown(text)} is a path out of the zip: zip the folder again, with plain names")
            elif parts and not any(_is_clutter(part) for part in parts):
                if text.endswith("/"):
                    members.append(Member(parts, is_folder=True))
                    continue
                refusal = _refusal(info)
                if refusal:
                    problems.append(f"{shown(text)} {refusal}")
                members.append(Member(parts, False, info.file_size, None if refusal else info))
        problems = shortened(problems, "members that are refused: zip the folder again, images only and no password")
        total, packed = sum(member.size for member in members), path.stat().st_size
        if total > RATIO_MATTERS_FROM and total > MAX_RATIO * packed:
            problems.append(
                f"{name} would grow from {packed} to {total} bytes: that is no zip of images, zip them again"
            )
            members = [Member(member.parts, member.is_folder, member.size) for member in members]
        source = _arrange(_without_top_folder(members), name, problems)
        source.archive = archive
    except BaseException:
        archive.close()
        raise
    return source


def _member_name(info: zipfile.ZipInfo) -> str:
    """The name as it was meant: Finder writes UTF-8 and does not say so, some Windows tools write backslashes."""
    name = info.orig_filename
    if not info.flag_bits & _UTF8_NAME:
        with suppress(UnicodeError):
            name = name.encode("cp437").decode()
    return name.replace("\\", "/")


def _refusal(info: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        return "is a link or a special file: put the image itself into the zip"
    if info.flag_bits & _ENCRYPTED:
        return "is encrypted: zip the folder again without a password"
    if info.compress_type not in _METHODS:
        return "is compressed by an unusual method: zip the folder again with the ordinary one (deflate)"
    if info.file_size > RATIO_MATTERS_FROM and info.file_size > MAX_RATIO * max(info.compress_size, 1):
        return f"would grow from {info.compress_size} to {info.file_size} bytes: that is no image, remove it"
    return None


def _without_top_folder(members: list[Member]) -> list[Member]:
    """Zipping a folder puts the folder itself inside; a lone class that holds files only is not such a folder."""
    inside = any(len(member.parts) > 2 or (member.is_folder and len(member.parts) == 2) for member in members)
    if len({member.parts[0] for member in members}) != 1 or not inside:
        return members
    return [
        Member(member.parts[1:], member.is_folder, member.size, member.handle)
        for member in members
        if len(member.parts) > 1
    ]


def _arrange(members: list[Member], name: str, problems: list[str]) -> Source:
    """Sort members into classes and their files; what fits nowhere is a problem."""
    classes: dict[str, None] = {}
    nested: dict[tuple[str, ...], None] = {}
    loose: list[Member] = []
    files: list[Member] = []
    for member in members:
        depth = len(member.parts)
        if depth == 1 and not member.is_folder:
            loose.append(member)
            continue
        classes[member.parts[0]] = None
        if depth > 2 or (depth == 2 and member.is_folder):
            nested[member.parts[:2]] = None
        elif depth == 2:
            files.append(member)
    outside = "lies outside every class folder: move it into the folder of its class, or remove it"
    inside = "is a folder inside a class: move its images up, or give {} itself if its sub-folders are the classes"
    found = [
        *problems,
        *shortened(
            [f"{shown(file.origin)} {outside}" for file in loose], "files outside every class folder: move them"
        ),
        *shortened([f"{shown('/'.join(at))} {inside.format(shown(at[0]))}" for at in nested], "folders inside a class"),
    ]
    if not classes:
        found.append(f"{name} has no sub-folders: {LAYOUT}")
    return Source(files, list(classes), found)


def _is_clutter(name: str) -> bool:
    """What the desktop leaves behind; nobody put it there on purpose."""
    return name.startswith(".") or name.lower() in _CLUTTER


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())
