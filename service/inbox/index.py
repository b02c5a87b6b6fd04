"""The in-memory index of the inbox: which novelties are similar, and how they are grouped.

Adding a sighting compares it with all novelties in a few vector operations, without a query. All arrays are allocated
once, for as many novelties as the inbox may hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.inbox.records import IndexEntry
from service.inbox.similarity import PLAIN_COSINE, EmbeddingScale, hamming
from service.wire.novelties import NoveltyState

GROUP_BITS = 10  # between hashes, without an embedding; more than for folding, because a group is less strict

Vector = NDArray[np.float32]


class _Rows:
    """Columns of a fixed capacity with one row per id. The rows in use come first, in no order."""

    def __init__(self, capacity: int) -> None:
        self._ids: list[str] = []
        self._row: dict[str, int] = {}
        self._hashes = np.zeros(capacity, np.uint64)
        # A vector shorter than the widest is padded with zeros, which do not change a cosine. Length 0: no vector.
        self._lengths = np.zeros(capacity, np.int64)
        self._vectors = np.zeros((capacity, 0), np.float32)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id: str) -> bool:
        return id in self._row

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self._hashes, self._lengths, self._vectors

    def _append(self, id: str, hash: int) -> int:
        row = self._row[id] = len(self._ids)
        for column in self._columns():
            column[row] = 0
        self._hashes[row] = hash
        self._ids.append(id)
        return row

    def _delete(self, id: str) -> None:
        """Delete a row; the last row moves into its place."""
        row, last = self._row.pop(id), self._ids.pop()
        if last != id:
            for column in self._columns():
                column[row] = column[len(self._ids)]
            self._ids[row] = last
            self._row[last] = row

    def _widen(self, width: int) -> None:
        """Make room for longer vectors: once per embedding length."""
        rows, widest = len(self._ids), self._vectors.shape[1]
        if width > widest:
            vectors = np.zeros((len(self._hashes), width), np.float32)
            vectors[:rows, :widest] = self._vectors[:rows]
            self._vectors = vectors


class NoveltyIndex(_Rows):
    """Hash, embedding, size and group of every novelty. Not thread-safe: callers hold the inbox's lock."""

    def __init__(self, capacity: int, scale: EmbeddingScale | None = None) -> None:
        super().__init__(capacity)
        self.groups = SimilarityGroups(capacity, scale)
        self.bytes = 0
        self._sizes = np.zeros(capacity, np.int64)
        self._foldable = np.zeros(capacity, np.bool_)

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return *super()._columns(), self._sizes, self._foldable

    def add(self, entry: IndexEntry) -> None:
        """Add a novelty. Only allocating longer vectors can fail, and comes before any change."""
        length = 0 if entry.embedding is None else len(entry.embedding)
        self._widen(length)
        self.groups.add(entry.id, entry.hash, entry.embedding)
        row = self._append(entry.id, entry.hash)
        if entry.embedding is not None:
            self._lengths[row] = length
            self._vectors[row, :length] = entry.embedding
        self._sizes[row] = entry.bytes
        self.bytes += entry.bytes
        self.set_state(entry.id, entry.state)

    def remove(self, id: str) -> None:
        self.groups.remove(id, self.embedding(id))
        self.bytes -= int(self._sizes[self._row[id]])
        self._delete(id)

    def set_state(self, id: str, state: NoveltyState) -> None:
        # Fold into dismissed novelties, which people do not want to see again. Do not fold into labelled ones: the
        # model should know them, so a similar novel image is news.
        self._foldable[self._row[id]] = state != "labelled"

    def embedding(self, id: str) -> Vector | None:
        row = self._row[id]
        length = int(self._lengths[row])
        return self._vectors[row, :length].copy() if length else None

    def find_similar(self, hash: int, embedding: Vector | None, max_bits: int, min_cosine: float) -> str | None:
        """The novelty to fold such an image into: of the similar ones, that with the nearest hash.

        Similar: the hashes differ in at most `max_bits` and, where both have an embedding of the same length, the
        cosine is at least `min_cosine`.
        """
        n = len(self)
        distances = hamming(hash, self._hashes[:n])
        rows = np.flatnonzero((distances <= max_bits) & self._foldable[:n])
        if len(rows) and embedding is not None:
            comparable = self._lengths[rows] == len(embedding)
            if comparable.any():
                vectors = self._vectors[:n, : len(embedding)]
                # Copying many rows costs more than multiplying all.
                cosines = (vectors @ embedding)[rows] if 4 * len(rows) > n else vectors[rows] @ embedding
                rows = rows[~comparable | (cosines >= min_cosine)]
        return self._ids[rows[np.argmin(distances[rows])]] if len(rows) else None


class SimilarityGroups(_Rows):
    """Groups of similar novelties. The vector of a group is the sum of its members' embeddings, which are compared on a
    scale: see `EmbeddingScale`.

    **A novelty stays in its group until it is removed: groups do not change while a person labels them.** Two groups
    that become similar later are not merged. The id of a group is that of its first member, and remains when that
    member is removed; after a restart such a group has the id of its oldest remaining member, and all groups are those
    of the scale in use then.
    """

    def __init__(self, capacity: int, scale: EmbeddingScale | None = None) -> None:
        super().__init__(capacity)
        self._scale = scale
        self._group_of: dict[str, str] = {}
        self._members: dict[str, dict[str, None]] = {}  # by group, in the order of arrival
        self._norms = np.zeros(capacity, np.float32)  # of the sums, on the scale
        self._summed = np.zeros(capacity, np.int64)  # members whose embeddings are in the sum

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return *super()._columns(), self._norms, self._summed

    def use_scale(self, scale: EmbeddingScale | None) -> None:
        """Compare on another scale from now on. Groups keep their members."""
        if scale is self._scale:
            return
        self._scale = scale
        for row in range(len(self)):
            self._norms[row] = self._norm(row)

    def group_of(self, id: str) -> str:
        return self._group_of[id]

    def members(self, group: str) -> tuple[str, ...]:
        """The novelties of a group, oldest first; none when there is no such group."""
        return tuple(self._members.get(group, ()))

    def add(self, id: str, hash: int, embedding: Vector | None) -> str:
        """Put a novelty into the nearest group, or into a new one; returns the group."""
        self._widen(0 if embedding is None else len(embedding))
        # A first member that was removed and comes back joins its old group: ids of groups are unique.
        group = id if id in self else self._nearest(hash, embedding)
        if group is None:
            group = id
            self._append(id, hash)
            self._members[id] = {}
        self._group_of[id] = group
        self._members[group][id] = None
        self._update_sum(self._row[group], embedding, 1)
        return group

    def remove(self, id: str, embedding: Vector | None) -> None:
        """Take a novelty out of its group; `embedding` is the one that it was added with."""
        group = self._group_of.pop(id)
        del self._members[group][id]
        if self._members[group]:
            self._update_sum(self._row[group], embedding, -1)
        else:
            del self._members[group]
            self._delete(group)

    def _nearest(self, hash: int, embedding: Vector | None) -> str | None:
        n = len(self)
        if n == 0:
            return None
        if embedding is None:
            distances = hamming(hash, self._hashes[:n])
            best = int(np.argmin(distances))
            return self._ids[best] if distances[best] <= GROUP_BITS else None
        comparable = (self._lengths[:n] == len(embedding)) & (self._norms[:n] > 0)
        if not comparable.any():
            return None
        scale = self._scale_of(len(embedding))
        if scale is None:
            direction, offset, least = embedding, 0.0, PLAIN_COSINE
        else:
            # With W = diag(scale.weights): (s - k c)' W (e - c) for the sum s of k embeddings, in one product.
            direction, offset = scale.direction(embedding)
            least = scale.least_cosine
        along = self._vectors[:n, : len(embedding)] @ direction - self._summed[:n] * offset
        cosines = np.divide(along, self._norms[:n], out=np.full(n, -1.0), where=comparable)
        best = int(np.argmax(cosines))
        return self._ids[best] if cosines[best] >= least else None

    def _scale_of(self, length: int) -> EmbeddingScale | None:
        return self._scale if self._scale is not None and len(self._scale.centre) == length else None

    def _update_sum(self, row: int, embedding: Vector | None, sign: int) -> None:
        """Add an embedding to a group's sum, or subtract it. Those of another length than the group's are left out."""
        if embedding is None or self._lengths[row] not in (0, len(embedding)):
            return
        self._lengths[row] = len(embedding)
        self._summed[row] += sign
        self._vectors[row, : len(embedding)] += sign * embedding
        if self._summed[row] == 0:  # clear what rounding leaves
            self._vectors[row], self._lengths[row] = 0, 0
        self._norms[row] = self._norm(row)

    def _norm(self, row: int) -> float:
        length = int(self._lengths[row])
        vector, scale = self._vectors[row, :length], self._scale_of(length)
        return float(np.linalg.norm(vector)) if scale is None else scale.norm(vector, int(self._summed[row]))
