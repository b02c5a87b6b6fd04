"""Open the batch in a folder with one sub-folder per class, or in a zip of such a folder.

A source is listed before it is read: a zip bomb or a batch over the limits is refused by its table of contents.
Nothing is unpacked to disk; the name of a zip member is only used as a label and in messages.
"""

import os
import re
import stat
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tasks.batch.check import DEFAULT_LIMITS, BatchCheck, BatchLimits, LabelledBatch, reason_of, shortened
from tasks.batch.class_names import quoted
from tasks.batch.zip_directory import ZIP_ERRORS, count_members
from tasks.errors import BatchError

LAYOUT = "give a folder with one sub-folder per class (cat/1.jpg, dog/2.jpg), or a zip of it"

# Images hardly compress: a large member that shrinks a hundredfold is refused. Small flat drawings may compress so far.
MAX_COMPRESSION = 100
COMPRESSION_CHECKED_FROM = 1024**2  # bytes
MEMBERS_PER_IMAGE = 4  # folders are members too, and macOS adds a twin to every file

_CLUTTER = {"__macosx", "thumbs.db", "desktop.ini"}
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # other methods let a small member expand without bound
_UTF8_NAME = 0x800
_ENCRYPTED = 0x1


@dataclass(frozen=True)
class _Member:
    """A file or a folder of a source, by its path inside it; a file without `read` is refused."""

    parts: tuple[str, ...]
    is_folder: bool
    size: int = 0
    read: Callable[[], bytes] | None = None

    @property
    def origin(self) -> str:
        return "/".join(self.parts)


class _Listing(NamedTuple):
    """The image files of a source, its classes (empty ones included) and the problems of its layout."""

    files: list[_Member]
    classes: list[str]
    problems: list[str]


@contextmanager
def open_batch(
    path: Path, known_classes: Collection[str] = (), limits: BatchLimits = DEFAULT_LIMITS, name: str = ""
) -> Iterator[LabelledBatch]:
    """Check the batch in a folder or a zip; `BatchError` lists all problems of its layout and its content.

    The batch reads its images from the source: use `batch.read` inside the context only. `name` replaces the path in
    messages.
    """
    with ExitStack() as stack:
        listing = _list_source(path, name or quoted(str(path)), limits, stack)
        yield _check(listing, known_classes, limits)


@contextmanager
def open_zip(file: BinaryIO, known_classes: Collection[str], limits: BatchLimits, name: str) -> Iterator[LabelledBatch]:
    """Check the batch in an open zip file, as `open_batch` does; the caller closes the file."""
    with ExitStack() as stack:
        yield _check(_list_zip(file, name, limits, stack), known_classes, limits)


def _check(listing: _Listing, known_classes: Collection[str], limits: BatchLimits) -> LabelledBatch:
    check = BatchCheck(known_classes, limits)
    for line in listing.problems:
        check.problem(line)
    for label in listing.classes:
        check.declare(label)
    total = sum(file.size for file in listing.files)
    over_limits = len(listing.files) > limits.max_images or total > limits.max_bytes
    for file in listing.files:
        if over_limits or file.read is None:
            check.skip(file.parts[-2], file.size)
        else:
            check.add(file.parts[-2], file.origin, file.read)
    return check.finish()


def _list_source(path: Path, name: str, limits: BatchLimits, stack: ExitStack) -> _Listing:
    """`stack` closes what the listed files are read from."""
    try:
        if path.is_dir():
            return _list_folder(path, name)
        if not path.exists():
            raise BatchError([f"{name} does not exist: {LAYOUT}"])
        if not path.is_file():
            raise BatchError([f"{name} is neither a folder nor a file: {LAYOUT}"])
        if zipfile.is_zipfile(path):
            return _list_zip(stack.enter_context(path.open("rb")), name, limits, stack)
    except (OSError, ValueError) as error:
        raise BatchError([f"{name} cannot be opened ({reason_of(error)}): check the path and its rights"]) from error
    if path.suffix.lower() == ".zip":
        raise BatchError([f"{name} is a broken zip, or not a zip: zip the folder again and copy the whole file"])
    raise BatchError([f"{name} is a file, but not a zip: {LAYOUT}"])


def _list_folder(root: Path, name: str) -> _Listing:
    """List two levels only: links are followed, and a cycle of links cannot recurse."""
    members: list[_Member] = []
    broken: list[str] = []

    def visit(folder: Path, above: tuple[str, ...]) -> None:
        for entry in sorted(os.listdir(folder)):
            if _is_clutter(entry):
                continue
            path, parts = folder / entry, (*above, entry)
            try:
                status = path.stat()
                if stat.S_ISDIR(status.st_mode):
                    if not above:
                        visit(path, parts)
                    members.append(_Member(parts, is_folder=True))
                elif stat.S_ISREG(status.st_mode):
                    members.append(_Member(parts, is_folder=False, size=status.st_size, read=path.read_bytes))
                else:
                    broken.append(f"{quoted('/'.join(parts))} is neither a file nor a folder: remove it")
            except OSError as error:
                remedy = "repair the link or its rights, or remove it"
                broken.append(f"{quoted('/'.join(parts))} cannot be opened ({reason_of(error)}): {remedy}")

    visit(root, ())
    return _arrange(members, name, shortened(broken, "entries that cannot be opened: repair or remove them"))


def _list_zip(file: BinaryIO, name: str, limits: BatchLimits, stack: ExitStack) -> _Listing:
    max_members = MEMBERS_PER_IMAGE * limits.max_images
    try:
        if count_members(file, max_members) > max_members:  # before zipfile makes an object of every member
            raise BatchError([f"{name} has more than {max_members} members: split the batch"])
        archive = stack.enter_context(zipfile.ZipFile(file))
    except ZIP_ERRORS as error:
        raise BatchError(
            [f"{name} is a broken zip ({reason_of(error)}): zip the folder again and copy the whole file"]
        ) from error
    infos = archive.infolist()
    members: list[_Member] = []
    problems: list[str] = []
    for info in infos:
        text = _member_name(info)
        parts = tuple(part for part in text.split("/") if part not in ("", "."))
        if text.startswith("/") or re.match(r"[A-Za-z]:", text) or ".." in parts or "\0" in text:
            problems.append(f"{quoted(text)} is a path out of the zip: zip the folder again, with plain names")
        elif parts and not any(_is_clutter(part) for part in parts):
            if text.endswith("/"):
                members.append(_Member(parts, is_folder=True))
                continue
            refusal = _refusal(info)
            if refusal:
                problems.append(f"{quoted(text)} {refusal}")
            read = None if refusal else partial(_read_member, archive, info)
            members.append(_Member(parts, False, info.file_size, read))
    problems = shortened(problems, "members that are refused: zip the folder again, images only and no password")
    total, packed = sum(member.size for member in members), file.seek(0, os.SEEK_END)
    if total > COMPRESSION_CHECKED_FROM and total > MAX_COMPRESSION * packed:
        problems.append(f"{name} would grow from {packed} to {total} bytes: it is not a zip of images, zip them again")
        members = [replace(member, read=None) for member in members]
    return _arrange(_without_top_folder(members), name, problems)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        return archive.read(info)
    except ZIP_ERRORS as error:
        raise OSError(f"damaged inside the zip: {error}") from error


def _member_name(info: zipfile.ZipInfo) -> str:
    """The member's name, decoded: Finder writes UTF-8 without the flag, some Windows tools write backslashes."""
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
    if info.file_size > COMPRESSION_CHECKED_FROM and info.file_size > MAX_COMPRESSION * max(info.compress_size, 1):
        return f"would grow from {info.compress_size} to {info.file_size} bytes: it is not an image, remove it"
    return None


def _without_top_folder(members: list[_Member]) -> list[_Member]:
    """Drop the folder that a zipping tool puts around the class folders; a single class with files only is kept."""
    has_classes_inside = any(
        len(member.parts) > 2 or (member.is_folder and len(member.parts) == 2) for member in members
    )
    if len({member.parts[0] for member in members}) != 1 or not has_classes_inside:
        return members
    return [replace(member, parts=member.parts[1:]) for member in members if len(member.parts) > 1]


def _arrange(members: list[_Member], name: str, problems: list[str]) -> _Listing:
    """Sort members into classes and their files; a member that fits neither is a problem."""
    classes: dict[str, None] = {}
    nested: dict[tuple[str, ...], None] = {}
    outside: list[str] = []
    files: list[_Member] = []
    for member in members:
        depth = len(member.parts)
        if depth == 1 and not member.is_folder:
            remedy = "move it into the folder of its class, or remove it"
            outside.append(f"{quoted(member.origin)} lies outside every class folder: {remedy}")
            continue
        classes[member.parts[0]] = None
        if depth > 2 or (depth == 2 and member.is_folder):
            nested[member.parts[:2]] = None
        elif depth == 2:
            files.append(member)
    inside = "is a folder inside a class: move its images up, or give {} itself if its sub-folders are the classes"
    problems = [
        *problems,
        *shortened(outside, "files outside every class folder: move them"),
        *shortened(
            [f"{quoted('/'.join(at))} {inside.format(quoted(at[0]))}" for at in nested], "folders inside a class"
        ),
    ]
    if not classes:
        problems.append(f"{name} has no sub-folders: {LAYOUT}")
    return _Listing(files, list(classes), problems)


def _is_clutter(name: str) -> bool:
    """Whether a desktop created the entry by itself."""
    return name.startswith(".") or name.lower() in _CLUTTER
