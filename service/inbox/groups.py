"""Likeness groups: the novelties that people look at, and name, together.

**An entry is in exactly one group from the moment it comes until it goes: groups do not reshuffle under the hands of
somebody who labels them.** The price is that two groups which later turn out to be one stay two. A group's name is the
id of the entry that founded it, and outlives it; after a restart, a group whose founder has gone is named after the
eldest that is left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.inbox.index import CHUNK, grown
from service.inbox.likeness import hamming

# Cosine to a group's mean direction. Measured on Grocery photos with the offline backbone, 10 of 81 classes at random,
# ten times: 0.70 makes 65 groups, and 96 % of the photos are of their group's commonest class; 0.65 makes 43 at 92 %,
# 0.55 makes 21 at 75 %. People mend a class in several groups with two clicks, and a mixed group photo by photo.
CLOSE = 0.70
CLOSE_BITS = 10  # between hashes, where there is no embedding; wider than for folding: alike is less than the same


class LikenessGroups:
    """Who belongs together. Each group has a row: the sum of its embeddings (of length 1), and its founder's hash."""

    def __init__(self) -> None:
        self._group_of: dict[str, str] = {}
        self._members: dict[str, dict[str, None]] = {}  # by group, in the order in which they came
        self._names: list[str] = []  # by row
        self._row: dict[str, int] = {}
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._sums = np.zeros((0, 0), dtype=np.float32)  # zeros behind embeddings that are shorter than the widest
        self._norms = np.zeros(0, dtype=np.float32)  # of the sums
        self._lengths = np.zeros(0, dtype=np.int64)  # of the embeddings, 0: none of the members has one
        self._summed = np.zeros(0, dtype=np.int64)  # members whose embeddings are in the sum

    def __len__(self) -> int:
        return len(self._names)

    def of(self, id: str) -> str:
        """The group of an entry."""
        return self._group_of[id]

    def members(self, group: str) -> tuple[str, ...]:
        """The entries of a group, the eldest first; none when there is no such group."""
        return tuple(self._members.get(group, ()))

    def add(self, id: str, hash: int, embedding: NDArray[np.float32] | None) -> str:
        """Put an entry into the group that it is most like, or into one of its own; returns which."""
        # Who founded a group and comes back after it was removed finds it again: two cannot have one name.
        group = id if id in self._row else self._nearest(hash, embedding)
        if group is None:
            group = self._found(id, hash, 0 if embedding is None else len(embedding))
        self._group_of[id] = group
        self._members[group][id] = None
        self._shift(self._row[group], embedding, 1)
        return group

    def remove(self, id: str, embedding: NDArray[np.float32] | None) -> None:
        """Take an entry out of its group; `embedding` is the one that it came with."""
        group = self._group_of.pop(id)
        del self._members[group][id]
        if self._members[group]:
            self._shift(self._row[group], embedding, -1)
        else:
            del self._members[group]
            self._close(group)

    def _nearest(self, hash: int, embedding: NDArray[np.float32] | None) -> str | None:
        n = len(self._names)
        if n == 0:
            return None
        if embedding is None:
            distances = hamming(hash, self._hashes[:n])
            best = int(np.argmin(distances))
            return self._names[best] if distances[best] <= CLOSE_BITS else None
        if len(embedding) > self._sums.shape[1]:  # longer than any that is there
            return None
        comparable = (self._lengths[:n] == len(embedding)) & (self._norms[:n] > 0)
        along = self._sums[:n, : len(embedding)] @ embedding
        cosines = np.divide(along, self._norms[:n], out=np.full(n, -1, np.float32), where=comparable)
        best = int(np.argmax(cosines))
        return self._names[best] if cosines[best] >= CLOSE else None

    def _found(self, id: str, hash: int, length: int) -> str:
        row = len(self._names)
        self._reserve(row + 1, length)
        self._hashes[row], self._lengths[row] = hash, length
        self._sums[row], self._norms[row], self._summed[row] = 0, 0, 0
        self._names.append(id)
        self._row[id] = row
        self._members[id] = {}
        return id

    def _shift(self, row: int, embedding: NDArray[np.float32] | None, sign: int) -> None:
        """Add an embedding to a group's sum, or take it away."""
        if embedding is None or self._lengths[row] not in (0, len(embedding)):
            return
        self._reserve(len(self._names), len(embedding))
        self._lengths[row] = len(embedding)
        self._summed[row] += sign
        self._sums[row, : len(embedding)] += sign * embedding
        if self._summed[row] == 0:  # not what rounding has left of it
            self._sums[row], self._lengths[row] = 0, 0
        self._norms[row] = np.linalg.norm(self._sums[row])

    def _close(self, group: str) -> None:
        """Forget a group; the last one moves into its row."""
        row, last = self._row.pop(group), len(self._names) - 1
        moved = self._names.pop()
        if row != last:
            for array in (self._hashes, self._sums, self._norms, self._lengths, self._summed):
                array[row] = array[last]
            self._names[row] = moved
            self._row[moved] = row

    def _reserve(self, rows: int, width: int) -> None:
        capacity, widest = self._sums.shape
        if rows <= capacity and width <= widest:
            return
        capacity = capacity if rows <= capacity else max(rows, capacity + max(CHUNK, capacity // 2))
        self._hashes = grown(self._hashes, (capacity,))
        self._norms = grown(self._norms, (capacity,))
        self._lengths = grown(self._lengths, (capacity,))
        self._summed = grown(self._summed, (capacity,))
        self._sums = grown(self._sums, (capacity, max(width, widest)))
