"""Image sets, and a file of the trunk's tokens, so that an image passes through the trunk once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from benchmarks.serving.made_images import make_image
from models.files import sha256_bytes, sha256_file, write_durable
from models.inference.rotations import ROTATIONS
from models.inference.runtime import Runtime
from models.network import backbone as backbone_module
from models.network.backbone import Backbone, open_backbone
from models.network.export import export, roles
from trainer.learning.forward_passes import CHUNK, MAX_VIEWS, Item
from trainer.learning.tokens import TokenCache

MADE = "made"  # the name of the generated image set
STORED_VIEWS = 3  # of an image: the plain one and two augmented ones, in all rotations
SLOTS = STORED_VIEWS * ROTATIONS


@dataclass(frozen=True)
class ImageSet:
    """Images by key `<split>/<index>`: concatenated JPEG files, offsets and labels per split."""

    name: str
    classes: list[str]
    tensors: dict[str, NDArray[Any]]
    sha256: str = ""  # of the file

    @classmethod
    def load(cls, path: Path) -> ImageSet:
        with safe_open(path, "numpy") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            return cls(path.stem, json.loads(file.metadata()["classes"]), tensors, sha256_file(path))

    @classmethod
    def made(cls, classes: int, train: int, test: int) -> ImageSet:
        """Generated images, where no image set is at hand."""
        names = [f"made {c}" for c in range(classes)]
        tensors: dict[str, NDArray[Any]] = {}
        for split, numbers in {"train": range(train), "test": range(1000, 1000 + test)}.items():
            images = [make_image(name, number) for name in names for number in numbers]
            tensors[f"{split}.bytes"] = np.frombuffer(b"".join(images), np.uint8)
            tensors[f"{split}.offsets"] = np.cumsum([0, *map(len, images)])
            tensors[f"{split}.labels"] = np.repeat(np.arange(classes), len(numbers))
        return cls(MADE, names, tensors, sha256_bytes(tensors["train.bytes"].tobytes()))

    def read(self, key: str) -> bytes:
        split, index = key.split("/")
        start, end = self.tensors[f"{split}.offsets"][int(index) : int(index) + 2]
        data: bytes = self.tensors[f"{split}.bytes"][start:end].tobytes()
        return data

    def pick(self, split: str, label: int, count: int | None, rng: np.random.Generator) -> list[str]:
        """Up to `count` random images of a class (all of them when None)."""
        own = np.flatnonzero(self.tensors[f"{split}.labels"] == label)
        if count is not None and count < len(own):
            own = np.sort(rng.choice(own, count, replace=False))
        return [f"{split}/{i}" for i in own]

    def count(self, split: str) -> int:
        return len(self.tensors[f"{split}.labels"])


class StoredTokens(TokenCache):
    """Tokens of images and of their first views in a memory-mapped file, for a CNN, whose image is one token.

    A row counts only once its flag is set, after the row itself: an interrupted run loses a chunk at most.
    """

    def __init__(self, backbone: Backbone, images: ImageSet, folder: Path, runtime: Runtime | None = None) -> None:
        super().__init__(backbone, images.read, runtime=runtime)
        self._images = images
        name = f"{images.name}-{images.sha256[:8]}-{backbone.spec.sha256[:8]}"
        # The file is sparse: views that no method needs take no room.
        rows, size = (images.count("train") + images.count("test")) * SLOTS, backbone.spec.frozen.size
        self._rows = _mapped(folder / f"{name}-views.tokens", np.dtype(np.float32), (rows, size))
        self._present = _mapped(folder / f"{name}-views.present", np.dtype(np.uint8), (rows,))

    def _compute(self, items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], Tensor]]:
        stored = [item for item in items if self._present[self._row(item)]]
        for start in range(0, len(stored), CHUNK):
            found = stored[start : start + CHUNK]
            yield found, torch.from_numpy(self._rows[[self._row(item) for item in found]])[:, None]
        known = set(stored)
        for chunk, tokens in super()._compute([item for item in items if item not in known]):
            rows = [self._row(item) for item in chunk]
            self._rows[rows] = tokens[:, 0].numpy()
            self._present[rows] = 1
            yield chunk, tokens

    def _row(self, item: Item) -> int:
        key, numbered = item
        turns, view = divmod(numbered, MAX_VIEWS)
        if view >= STORED_VIEWS:
            raise ValueError(f"only {STORED_VIEWS} views of an image are stored: set views to {STORED_VIEWS} at most")
        split, index = key.split("/")
        place = int(index) + (self._images.count("train") if split == "test" else 0)
        return place * SLOTS + turns * STORED_VIEWS + view


def _mapped(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.memmap(path, kind, "r+" if path.exists() else "w+", shape=shape)


def recorded_now(folder: Path, name: str, weights: Path | None = None, blocks: int | None = None) -> Backbone:
    """The backbone as the present code records it in a new data folder, whatever an earlier run left in `folder`."""
    code = sha256_file(Path(backbone_module.__file__))[:12]
    place = f"{name}-{code}" if blocks is None else f"{name}-{blocks}-{code}"
    return open_backbone(folder / "backbones" / place, name, weights, blocks)


def open_tokens(backbone: Backbone, images: ImageSet, folder: Path) -> TokenCache:
    """Stored tokens of a CNN. Those of a transformer are 20 times as large and cheap to compute: kept in memory."""
    if backbone.spec.frozen.parts[0].name == "pooled":
        return StoredTokens(backbone, images, folder, _runtime(backbone, folder))
    return TokenCache(backbone, images.read)


def _runtime(backbone: Backbone, folder: Path) -> Runtime:
    """ONNX Runtime, which computes tokens in the trainer as well; the graphs are exported once per folder."""
    paths = {role: folder / f"{backbone.spec.sha256[:12]}-{role}.onnx" for role in roles(backbone)}
    if not all(path.is_file() for path in paths.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for role, data in export(backbone).items():
            write_durable(paths[role], data)
    return Runtime(dict(paths), "cpu", torch.get_num_threads())


def plain_features(tokens: TokenCache, keys: Sequence[str]) -> NDArray[np.float64]:
    """The backbone's own feature: the pooled feature of a CNN, the CLS token of a transformer. (n, d)"""
    part = tokens.backbone.spec.frozen.parts[0]
    out = [np.zeros((0, part.size))]
    for start in range(0, len(keys), CHUNK):
        with torch.inference_mode():
            parts = tokens.backbone.frozen.parts(tokens.get(keys[start : start + CHUNK]))
        out.append(parts[:, : part.size].cpu().numpy().astype(np.float64))
    return np.concatenate(out)
