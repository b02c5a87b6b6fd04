"""What the pictures of the inbox look like, in memory: the fold check is a few vector operations, not a query."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from service.inbox.likeness import cosine, hamming

Scalar = TypeVar("Scalar", bound=np.generic)

CHUNK = 512  # entries that the arrays grow by


class LikenessIndex:
    """Hashes and embeddings (of length 1) by id. Entries lie densely in the first rows of the arrays, in no order."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._row: dict[str, int] = {}
        self._hashes = np.zeros(0, dtype=np.uint64)
        self._folds = np.zeros(0, dtype=np.bool_)
        # An embedding shorter than the widest is padded with zeros, which no cosine feels; a length of 0 means none.
        self._lengths = np.zeros(0, dtype=np.int64)
        self._vectors = np.zeros((0, 0), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id: str) -> bool:
        return id in self._row

    def add(self, id: str, hash: int, embedding: NDArray[np.float32] | None, folds: bool) -> None:
        """Remember an entry; `folds`: pictures like it fold into it."""
        vector = np.zeros(0, dtype=np.float32) if embedding is None else embedding
        row = len(self._ids)
        self._reserve(row + 1, len(vector))
        self._hashes[row], self._folds[row], self._lengths[row] = hash, folds, len(vector)
        self._vectors[row] = 0
        self._vectors[row, : len(vector)] = vector
        self._ids.append(id)
        self._row[id] = row

    def embedding(self, id: str) -> NDArray[np.float32] | None:
        """The embedding of an entry, None when it has none."""
        row = self._row[id]
        length = int(self._lengths[row])
        return self._vectors[row, :length].copy() if length else None

    def remove(self, id: str) -> None:
        """Forget an entry; the last one moves into its row."""
        row, last = self._row.pop(id), len(self._ids) - 1
        moved = self._ids.pop()
        if row != last:
            for array in (self._hashes, self._folds, self._lengths, self._vectors):
                array[row] = array[last]
            self._ids[row] = moved
            self._row[moved] = row

    def set_folds(self, id: str, folds: bool) -> None:
        self._folds[self._row[id]] = folds

    def alike(self, hash: int, embedding: NDArray[np.float32] | None, bits: int, closeness: float) -> str | None:
        """The entry to fold such a picture into: of those alike the one whose hash is nearest.

        Alike are hashes at most `bits` apart and, where both have an embedding of equal length, a cosine of at least
        `closeness`.
        """
        n = len(self._ids)
        distances = hamming(hash, self._hashes[:n])
        rows = np.flatnonzero((distances <= bits) & self._folds[:n])
        if len(rows) and embedding is not None:
            comparable = self._lengths[rows] == len(embedding)
            rows = rows[~comparable | (self._cosines(embedding, rows) >= closeness)]
        if not len(rows):
            return None
        nearest: str = self._ids[rows[np.argmin(distances[rows])]]
        return nearest

    def _cosines(self, embedding: NDArray[np.float32], rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """With the embeddings in some rows; without meaning where the length is another."""
        vectors = self._vectors[: len(self._ids), : len(embedding)]
        if embedding.size > vectors.shape[1]:  # longer than any that is there
            return np.zeros(len(rows), dtype=np.float32)
        # Copying many rows out costs more than multiplying the others, too.
        if 4 * len(rows) > len(vectors):
            return cosine(embedding, vectors)[rows]
        return cosine(embedding, vectors[rows])

    def _reserve(self, rows: int, width: int) -> None:
        capacity, widest = self._vectors.shape
        if rows <= capacity and width <= widest:
            return
        # A half more at a time: the copying stays a constant cost an entry, however large the inbox.
        capacity = capacity if rows <= capacity else max(rows, capacity + max(CHUNK, capacity // 2))
        self._hashes = grown(self._hashes, (capacity,))
        self._folds = grown(self._folds, (capacity,))
        self._lengths = grown(self._lengths, (capacity,))
        self._vectors = grown(self._vectors, (capacity, max(width, widest)))


def grown(array: NDArray[Scalar], shape: tuple[int, ...]) -> NDArray[Scalar]:
    """A larger array with the old one in its corner, and zeros around it."""
    out = np.zeros(shape, dtype=array.dtype)
    out[tuple(slice(size) for size in array.shape)] = array
    return out
