"""Tokens and features of images, computed once: cached in memory while a task is learned, and on disk for later tasks.

Neither the trunk nor the network of a finished task ever changes, so only new images are read and computed. Whole
chunks of images are computed by all processes of the trainer. The networks of a backbone with one token cost less than
a look at the disk: they run again.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor

from models.errors import StoreError
from models.inference.evidence import Floats
from models.inference.model import TaskModel
from models.inference.one_token import OneTokenNetworks, TaskArrays
from models.inference.runtime import Runtime
from models.network.adapted_blocks import TaskTensors, tensors_of
from models.network.backbone import Backbone
from tasks.images import FeatureCache, FeatureStore
from trainer.learning.forward_passes import CHUNK, MAX_VIEWS, ForwardPasses, Item, Reader, padded
from trainer.learning.processes import Job, OneProcess, Processes
from trainer.learning.reproducibility import blas_threads
from trainer.learning.scored_images import ScoredImages

T = TypeVar("T")
CACHE_BYTES = 4 * 2**30
FROZEN = "frozen"  # the name of stored frozen features
MAP = "map"  # of stored maps
KEPT_TAILS = 3  # of a version, of its parent, and of one that was not accepted: most of their images are the same


class TokenCache:
    """Trunk outputs by image key and view. View 0 is the plain image, the others are augmented or turned.

    Tokens beyond `max_bytes` are not cached in memory but computed at every use. `stored` keeps those of plain images,
    and features, for later tasks. `runtime` computes in place of torch, and `processes` share the chunks.
    `features` has the tokens of images that cannot be read any more.
    """

    def __init__(
        self,
        backbone: Backbone,
        read: Reader,
        seed: int = 0,
        device: str = "cpu",
        max_bytes: int = CACHE_BYTES,
        stored: FeatureCache | None = None,
        runtime: Runtime | None = None,
        processes: Processes | None = None,
        features: FeatureStore | None = None,
    ) -> None:
        self.backbone, self._read = backbone, read
        self.passes, self.processes = ForwardPasses(backbone, seed, device, runtime), processes or OneProcess()
        self.device = self.passes.device
        self._cache: dict[Item, Tensor] = {}
        self._max_bytes = self._free_bytes = max_bytes
        self._stored, self._kept = stored, features
        self.scored = ScoredImages()
        self._maps: dict[str, Tensor] = {}  # by image key, with half the digits: most of the memory of a CNN's images
        # Outputs of the tail: by adapters, by image key.
        self._refined: LRUCache[str, dict[str, NDArray[np.float32]]] = LRUCache(KEPT_TAILS)
        self._drawn: dict[str, NDArray[np.float32]] = {}  # the frozen feature of a draw and its random features
        self.drawn_scale = 1.0

    def prepare(
        self, keys: Sequence[str], views: Sequence[int] = (0,), on_done: Callable[[int], None] = lambda n: None
    ) -> None:
        """Fill the cache as far as it has room; `on_done` gets the number of images that were finished since."""
        wanted = [(key, view) for key in dict.fromkeys(keys) for view in views]
        missing = [item for item in wanted if item not in self._cache]
        together = CHUNK * self.processes.count
        for start in range(0, len(missing), together):
            items = missing[start : start + together]
            if self._free_bytes > 0:
                self._fetch(items)
            on_done(len(items))

    def keep_only(self, keys: Collection[str]) -> None:
        """Before another task: forget all other images, and augmented views."""
        self._cache = {item: row for item, row in self._cache.items() if item[0] in keys and item[1] == 0}
        self._drawn = {}
        self._maps = {key: own for key, own in self._maps.items() if key in keys}
        for rows in self._refined.values():
            for key in [key for key in rows if key not in keys]:
                del rows[key]
        used = [*self._cache.values(), *self._maps.values()]
        self._free_bytes = self._max_bytes - sum(row.nbytes for row in used)
        self.scored.keep_only(keys)
        if self._stored is not None:
            self._stored.keep_only(keys)

    def add_drawn(self, keys: Sequence[str], features: Floats, expanded: Floats) -> None:
        """Use draws as images: frozen features (n, f), random features (n, M), tokens `drawn_scale` times the first."""
        rows = np.concatenate([features, expanded], axis=1).astype(np.float32)
        self._drawn |= dict(zip(keys, rows, strict=True))

    def has_drawn(self, key: str) -> bool:
        return key in self._drawn

    def views(self, key: str, views: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        """The tokens of some views of an image, (P, d) each, in main memory."""
        found = self._fetch([(key, view) for view in views])
        return {view: found[key, view].numpy() for view in views}

    def get(self, keys: Sequence[str], views: Sequence[int] | None = None) -> Tensor:
        """(n, P, d), for a CNN (n, 1, f), on the device."""
        items = list(zip(keys, views or [0] * len(keys), strict=True))
        found = self._fetch(items)
        return torch.stack([found[item] for item in items]).to(self.device)

    def features(
        self, keys: Sequence[str], task: TaskTensors, *, view: int = 0, store: bool = True
    ) -> NDArray[np.float32]:
        """z under one finished task's network: (n, d); without `store`, later tasks compute it again."""
        if self.backbone.one_token:
            network = OneTokenNetworks([TaskArrays(*(tensor.contiguous().numpy() for tensor in task))])
            alone: NDArray[np.float32] = self._one_token_features(keys, [network], view)[0]
            return alone
        job = Job("task features", {}, dict(zip(TaskTensors._fields, task, strict=True)))
        return self._feature_rows(
            keys,
            f"task {_sha256(tensor.numpy() for tensor in task)}" + (f" view {view}" if view else ""),
            self.backbone.spec.dimensions,
            lambda tokens: self.passes.task_features(tokens, task),
            job,
            view,
            store,
        )

    def features_of_all(self, keys: Sequence[str], tasks: Sequence[TaskModel], *, view: int = 0) -> NDArray[np.float32]:
        """z under the networks of several learned tasks: (T, n, d)."""
        if self.backbone.one_token:
            return self._one_token_features(keys, [task.one_token_network for task in tasks], view)
        every = [self.features(keys, tensors_of(task), view=view) for task in tasks]
        return np.stack(every) if every else np.zeros((0, len(keys), self.backbone.spec.dimensions), np.float32)

    def _one_token_features(
        self, keys: Sequence[str], networks: Sequence[OneTokenNetworks], view: int
    ) -> NDArray[np.float32]:
        """Under networks of one task each: the last bits of a feature depend on those that are computed with it."""
        size = self.backbone.spec.dimensions  # what follows in the token is for the frozen feature only
        out = np.empty((len(networks), len(keys), size), np.float32)
        pooled = np.zeros((-(-len(keys) // CHUNK) * CHUNK, size), np.float32)  # whole chunks
        if keys:
            pooled[: len(keys)] = self._tokens(keys, view)[:, 0, :size].numpy()
        with blas_threads(1):  # two take as long for such small products, and the time of both cores
            for own, network in zip(out, networks, strict=True):
                for start in range(0, len(keys), CHUNK):
                    chunk = own[start : start + CHUNK]
                    chunk[:] = network.features(pooled[start : start + CHUNK])[0, : len(chunk)]
        return out

    def frozen(self, keys: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The frozen feature (n, f) and its random features (n, M)."""
        spec = self.backbone.spec.frozen
        rows = self._feature_rows(
            keys, FROZEN, spec.size + spec.expanded, self.passes.frozen_features, Job("frozen features", {}, {})
        )
        return np.ascontiguousarray(rows[:, : spec.size]), np.ascontiguousarray(rows[:, spec.size :])

    def maps(self, keys: Sequence[str]) -> Tensor:
        """What a CNN's tail starts from: (n, c, h, w) in float16, in main memory."""
        found: dict[str, Tensor] = {}
        shape = self.backbone.tail.shape if self.backbone.tail is not None else ()
        for key in keys:
            if (own := self._maps.get(key)) is not None:
                found[key] = own
            elif (stored := self._stored.get(key, MAP) if self._stored is not None else None) is not None:
                found[key] = torch.from_numpy(stored).half().reshape(shape)
        for chunk in _chunks([key for key in dict.fromkeys(keys) if key not in found]):
            computed = self.passes.maps(chunk, self._read)
            found |= {key: row.half() for key, row in zip(chunk, computed, strict=True)}
            if self._stored is not None:
                self._stored.put(MAP, dict(zip(chunk, computed.flatten(1)[:, None].numpy(), strict=True)))
        for key, own in found.items():
            if key not in self._maps and own.nbytes <= self._free_bytes:
                self._free_bytes -= own.nbytes
                self._maps[key] = own
        return torch.stack([found[key] for key in keys])

    def refined(self, keys: Sequence[str], tail: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """The outputs of a CNN's tail with these adapters: (n, r)."""
        rows = self._refined.setdefault(_sha256(tail[name] for name in sorted(tail)), {})
        for chunk in _chunks([key for key in dict.fromkeys(keys) if key not in rows]):
            computed = self.passes.refined_features(self.maps(chunk).float(), tail)
            rows |= {key: row.copy() for key, row in zip(chunk, computed, strict=True)}  # a slice keeps the whole chunk
        nothing = np.zeros((0, self.backbone.spec.dimensions), np.float32)
        return np.stack([rows[key] for key in keys]) if keys else nothing

    def _feature_rows(
        self,
        keys: Sequence[str],
        kind: str,
        size: int,
        compute: Callable[[Tensor], NDArray[np.float32]],
        job: Job,
        view: int = 0,
        store: bool = True,
    ) -> NDArray[np.float32]:
        """One row per image: (n, size), stored ones or computed from tokens: by `compute`, or by `job` elsewhere."""
        out = np.empty((len(keys), size), np.float32)
        missing: dict[str, list[int]] = {}  # image key -> its places
        for place, key in enumerate(keys):
            found = self._stored.get(key, kind) if self._stored is not None else None
            if key in self._drawn and kind == FROZEN:
                out[place] = self._drawn[key]
            elif found is not None and found.shape == (1, size):
                out[place] = found[0]
            else:
                missing.setdefault(key, []).append(place)
        chunks = _chunks(list(missing))
        computed = self.processes.map(
            (padded(self._tokens(chunk, view)) for chunk in chunks),
            compute,
            lambda tokens: job._replace(tensors={**job.tensors, "tokens": tokens}),
            lambda answer: answer["features"].numpy(),
        )
        for chunk, whole in zip(chunks, computed, strict=True):
            rows = whole[: len(chunk)]
            for key, row in zip(chunk, rows, strict=True):
                out[missing[key]] = row
            if self._stored is not None and store:
                self._stored.put(kind, {key: row[None] for key, row in zip(chunk, rows, strict=True)})
        return out

    def _tokens(self, keys: Sequence[str], view: int) -> Tensor:
        """In main memory."""
        found = self._fetch([(key, view) for key in keys])
        return torch.stack([found[key, view] for key in keys])

    def _fetch(self, items: Sequence[Item]) -> dict[Item, Tensor]:
        found = {item: self._cache[item] for item in items if item in self._cache}
        found |= {item: self._drawn_token(item[0]) for item in items if item[0] in self._drawn}
        for item in items:
            if item not in found and (stored := self._stored_tokens(item)) is not None:
                found[item] = self._cache[item] = stored  # large ones are mapped: they need no memory of their own
        for kept in self._kept_tokens([item for item in dict.fromkeys(items) if item not in found]):
            self._remember(kept, found)
        for chunk, tokens in self._compute([item for item in dict.fromkeys(items) if item not in found]):
            # Clones: a slice would keep the whole chunk in memory.
            self._remember({item: row.clone() for item, row in zip(chunk, tokens, strict=True)}, found)
            if self._stored is not None:
                for view in {view for _, view in chunk}:
                    if (kind := _kind(view)) is not None:
                        plain = {key: found[key, own].numpy() for key, own in chunk if own == view}
                        self._stored.put(kind, plain)
        return found

    def _drawn_token(self, key: str) -> Tensor:
        return torch.from_numpy(self.drawn_scale * self._drawn[key][None, : self.backbone.spec.frozen.size])

    def _remember(self, rows: Mapping[Item, Tensor], found: dict[Item, Tensor]) -> None:
        """Add the tokens to those that are found, and to the cache while it has room."""
        for item, row in rows.items():
            found[item] = row
            if row.nbytes <= self._free_bytes:
                self._free_bytes -= row.nbytes
                self._cache[item] = row
            else:
                self._free_bytes = 0  # full: later chunks are not cached

    def _stored_tokens(self, item: Item) -> Tensor | None:
        key, view = item
        kind = _kind(view)
        stored = self._stored.get(key, kind) if self._stored is not None and kind is not None else None
        return None if stored is None else torch.from_numpy(stored)

    def _kept_tokens(self, items: Sequence[Item]) -> Iterator[dict[Item, Tensor]]:
        """Those of the feature store."""
        if self._kept is None:
            return
        for chunk in _chunks(items):
            rows = zip(chunk, self._kept.get_all(chunk), strict=True)
            stored = {item: row for item, row in rows if row is not None}
            for key, view in chunk:  # the number of views was raised since the image was discarded
                if 0 < view < MAX_VIEWS and (key, view) not in stored and not self._readable(key):
                    plain = self._kept.get(key)
                    stored |= {} if plain is None else {(key, view): plain}
            if self._stored is not None and self._kept.remote:
                self._stored.put("tokens", {key: row for (key, view), row in stored.items() if view == 0})
            yield {item: torch.from_numpy(row) for item, row in stored.items()}

    def _readable(self, key: str) -> bool:
        try:
            return bool(self._read(key))
        except StoreError:
            return False

    def _compute(self, items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], Tensor]]:
        chunks = _chunks(items)
        computed = self.processes.map(
            chunks,
            lambda chunk: self.passes.tokens(chunk, self._read),
            lambda chunk: _token_job(chunk, self._read),
            lambda answer: answer["tokens"],
        )
        return zip(chunks, computed, strict=True)


def _kind(view: int) -> str | None:
    """The name under which the tokens of a plain image are stored; None for an augmented one."""
    turns, augmented = divmod(view, MAX_VIEWS)
    if augmented:
        return None
    return f"tokens turned {turns}" if turns else "tokens"


def _chunks(rows: Sequence[T]) -> list[Sequence[T]]:
    return [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]


def _token_job(items: Sequence[Item], read: Reader) -> Job:
    """With the bytes of the images: a helper reads none."""
    images = {
        str(place): torch.frombuffer(bytearray(read(key)), dtype=torch.uint8) for place, (key, _) in enumerate(items)
    }
    return Job("tokens", {"items": list(items)}, images)


def _sha256(arrays: Iterable[NDArray[np.float32]]) -> str:
    """Of the arrays that features depend on."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(array.shape).encode() + array.tobytes())
    return digest.hexdigest()
