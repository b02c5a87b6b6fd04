"""Count the members of a zip by its directory, without the object that `zipfile` makes of every member.

A zip of 3 million empty members has 150 MB; its objects would take more than a gigabyte.
"""

import os
import struct
import zipfile
import zlib
from typing import BinaryIO

ZIP_ERRORS = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, zlib.error, struct.error, OverflowError)
MAX_ENTRY_BYTES = 1024  # mean bytes of the directory per member: a name, and what tools add to it
MIN_DIRECTORY_LIMIT = 2**20

# Signature, then the fields that are read; see section 4.3 of the specification (APPNOTE.TXT).
_END = struct.Struct("<4s6xHLLH")  # members, bytes and offset of the directory, bytes of the comment
_LOCATOR_64 = struct.Struct("<4s4xQ4x")  # offset of the record below
_END_64 = struct.Struct("<4s28xQQ8x")  # members, bytes of the directory
_ENTRY = struct.Struct("<4s24xHHH12x")  # bytes of the name, the extra field and the comment
_MAX_COMMENT = 2**16


def count_members(file: BinaryIO, limit: int) -> int:
    """The number of members; a number above `limit` if there are more, of which the rest is not counted.

    The count is made twice: the end record states it, and the directory must agree, because `zipfile` follows the
    directory. Raises one of ZIP_ERRORS if the file is no zip.
    """
    stated, size, end = _end_record(file)
    if stated > limit:
        return stated
    if size > max(MIN_DIRECTORY_LIMIT, MAX_ENTRY_BYTES * limit):
        raise zipfile.BadZipFile(f"its directory has {size} bytes")
    if size > end:
        raise zipfile.BadZipFile("its directory is not complete")
    file.seek(end - size)
    directory, at, found = file.read(size), 0, 0
    while at < size and found <= limit:
        signature, *lengths = _ENTRY.unpack_from(directory, at)
        if signature != b"PK\1\2":
            raise zipfile.BadZipFile("its directory is damaged")
        at += _ENTRY.size + sum(lengths)
        found += 1
    return found


def _end_record(file: BinaryIO) -> tuple[int, int, int]:
    """Members, bytes of the directory, and where the directory ends. Finds the same record as `zipfile`."""
    length = file.seek(0, os.SEEK_END)
    start = max(0, length - _END.size - _MAX_COMMENT)
    file.seek(start)
    tail = file.read()
    at = length - _END.size - start  # a zip without a comment, as almost all are
    if at < 0 or not tail.startswith(b"PK\5\6", at) or not tail.endswith(b"\0\0"):
        at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise zipfile.BadZipFile("it has no end record")
    _, members, size, _, _ = _END.unpack_from(tail, at)
    end = start + at
    if end < _LOCATOR_64.size + _END_64.size:
        return members, size, end
    file.seek(end - _LOCATOR_64.size)
    signature, offset = _LOCATOR_64.unpack(file.read(_LOCATOR_64.size))
    if signature != b"PK\6\7":
        return members, size, end
    end -= _LOCATOR_64.size + _END_64.size
    file.seek(end)
    signature, members, size = _END_64.unpack(file.read(_END_64.size))
    if signature != b"PK\6\6" or offset != end:  # releases of Python look for it in different places
        raise zipfile.BadZipFile("its end record is damaged")
    return members, size, end
