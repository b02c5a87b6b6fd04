"""Records of features, as bytes: each has the kind of its features, its shape and a checksum.

A file or value is a sequence of records. **A record that is read is whole and unchanged**: what follows damage, or an
incomplete record, is not read.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

Record = NDArray[np.float32]  # (rows, columns)

_HEADER = struct.Struct("<4sI32sQII")  # mark, checksum of the rest, hash of the kind, bytes, columns, 0
_MARK = b"OWF1"
HEADER_BYTES = _HEADER.size


def digest_of(kind: str) -> bytes:
    return hashlib.sha256(kind.encode()).digest()


def packed(kind: str, record: Record) -> bytes:
    payload = record.tobytes()
    header = _HEADER.pack(_MARK, 0, digest_of(kind), len(payload), record.shape[-1], 0)
    return _MARK + struct.pack("<I", zlib.crc32(payload, zlib.crc32(header[8:]))) + header[8:] + payload


def unpacked(data: mmap.mmap | bytearray | bytes) -> tuple[dict[bytes, Record], int]:
    """(the records up to the first damaged or incomplete one, the end of the last of them)"""
    view, records, end = memoryview(data), {}, 0
    while end + _HEADER.size <= len(view):
        mark, checksum, digest, size, columns, _ = _HEADER.unpack_from(view, end)
        start = end + _HEADER.size
        if mark != _MARK or columns == 0 or size % (4 * columns) or start + size > len(view):
            break
        payload = view[start : start + size]
        if zlib.crc32(payload, zlib.crc32(view[end + 8 : start])) != checksum:
            break
        records[digest] = np.frombuffer(payload, np.float32).reshape(-1, columns)
        end = start + size
    return records, end
