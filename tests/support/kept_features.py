"""Data folders that keep less than images, and a search for images and features in everything that they hold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import redis

from models.files import sha256_bytes, write_durable
from models.inference.rotations import ROTATIONS
from models.versions.backbone_spec import RECORD
from models.versions.keep import Keep
from models.versions.store import VersionStore
from tests.support.batches import check_batch
from tests.support.exported import export_once
from tests.support.once_per_run import made_once
from tests.support.redis_servers import RedisServer
from tests.support.servers import IMAGES, learned_folder
from tests.support.tiny_model import class_tasks, recorded_tiny, tiny_cnn, tiny_settings
from trainer import context, conversion
from trainer.conversion import Converted, convert
from trainer.learning.forward_passes import turned_view
from trainer.learning.tokens import TokenCache
from trainer.publish import Outcome, learn_batch

FIRST = 1024  # bytes of an image that must not be found either


def convert_until_killed(data: Path, step: str, keep: Keep = "features") -> None:
    """A conversion that is killed after one of its steps, a function of `trainer.conversion`."""
    work = getattr(conversion, step)

    def killed(*arguments: object) -> None:
        work(*arguments)
        raise KeyboardInterrupt

    with patch.object(conversion, step, killed), pytest.raises(KeyboardInterrupt):
        convert_tiny(data, keep=keep)


@contextmanager
def tiny_backbones() -> Iterator[None]:
    """Data folders have the tiny backbone that they record."""
    opened, exported = context.open_backbone, context.export
    context.open_backbone, context.export = recorded_tiny, export_once  # type: ignore[assignment]
    try:
        yield
    finally:
        context.open_backbone, context.export = opened, exported


def convert_tiny(data: Path, unfinished: Collection[str] = (), keep: Keep = "features") -> Converted:
    """Convert a folder with a tiny backbone."""
    with tiny_backbones():
        return convert(data, keep, tiny_settings(), unfinished)


def converted_folder(root: Path) -> Path:
    """A private copy of the data folder with three versions and a fourth, which says that the folder keeps features."""
    source = made_once("three versions with features", lambda folder: convert_tiny(learned_folder(folder)))
    shutil.copytree(source, root, dirs_exist_ok=True)
    return root


def cnn_folder(root: Path, keep: Keep) -> Path:
    """A private copy of a data folder with two versions of `hat-csi`, on a backbone with one token: classes 0 to 3."""
    source = made_once(f"two versions with {keep}", lambda folder: _learn_two_versions(folder, keep))
    shutil.copytree(source, root, dirs_exist_ok=True)
    return root


def _learn_two_versions(folder: Path, keep: Keep) -> None:
    write_durable(folder / RECORD, json.dumps(tiny_cnn().spec.to_dict()).encode())
    for task in class_tasks([2, 2], images=12):
        learn_tiny(folder, task, keep=keep, method="hat-csi")


def learn_tiny(folder: Path, task: dict[str, list[str]], provisional: bool = False, **settings: Any) -> Outcome:
    """Learn a batch of tiny images."""
    batch = check_batch((name, f"{key}.png", IMAGES.read(key)) for name, keys in task.items() for key in keys)
    chosen = tiny_settings(**{"replay_size": None, "gate_accuracy": 1, "gate_auc": 1, **settings})
    with tiny_backbones():
        return learn_batch(folder, batch, chosen, lambda event: None, provisional=provisional)


def feature_vectors(folder: Path, images: Collection[bytes]) -> list[bytes]:
    """What the backbone of a `cnn_folder` computes from images, as bytes: tokens of each rotation, frozen features."""
    store, by_key = VersionStore(folder), {sha256_bytes(data): data for data in images}
    manifest, keys = store.current_manifest(), list(by_key)
    assert manifest is not None
    runtime = context.runtime_of(store, manifest.graphs, tiny_settings())
    tokens = TokenCache(tiny_cnn(), by_key.__getitem__, runtime=runtime)
    turned = [tokens.get(keys, [turned_view(0, turns)] * len(keys))[:, 0].numpy() for turns in range(ROTATIONS)]
    arrays = [*turned, *tokens.frozen(keys)]
    return [row.astype(kind).tobytes() for rows in arrays for row in rows for kind in (np.float32, np.float64)]


def places_of(images: Collection[bytes], folder: Path, server: RedisServer | None = None) -> list[str]:
    """Every file of the folder, and every key of the Redis server, that contains an image or its beginning."""
    parts = {part for image in images for part in (image, image[:FIRST])}
    found = [name for name, data in _files(folder) if any(part in data for part in parts)]
    return found + [name for name, data in _values(server) if any(part in data for part in parts)]


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            try:
                if path.is_file():
                    yield str(path.relative_to(folder)), path.read_bytes()
            except FileNotFoundError:
                continue  # removed since it was listed


def _values(server: RedisServer | None) -> Iterator[tuple[str, bytes]]:
    if server is None:
        return
    client: Any = redis.Redis.from_url(server.url)
    readers = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"stream": client.xrange,
    }
    for key in client.scan_iter():
        kind = client.type(key)
        if kind in readers:
            yield f"key {key!r}", b"\n".join(_leaves(readers[kind](key)))
    client.close()


def _leaves(value: Any) -> Iterator[bytes]:
    """All bytes in a reply of Redis."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        yield from _leaves([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _leaves(part)
