"""One ONNX Runtime session pair a backbone, shared by every version that was made with it.

A version's tasks are inputs of the graphs, so that a new version needs no new session; the sessions go when the last
version that uses them has gone.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from models.errors import CorruptVersion
from models.inference.runtime import Device, Runtime
from models.versions.manifest import Manifest
from models.versions.store import VersionStore


class Runtimes:
    """The runtimes in use, by the hashes of their graphs."""

    def __init__(self, store: VersionStore, device: Device = "auto", threads: int | None = None) -> None:
        self._store, self._device, self._threads = store, device, threads
        self._open: WeakValueDictionary[tuple[str, str], Runtime] = WeakValueDictionary()
        self._lock = threading.Lock()

    def of(self, manifest: Manifest) -> Runtime:
        """The runtime of a version whose graphs have been verified."""
        missing = [role for role in ("trunk", "blocks") if role not in manifest.graphs]
        if missing:
            raise CorruptVersion(f"version {manifest.version}: its manifest names no graph for {' and '.join(missing)}")
        trunk, blocks = manifest.graphs["trunk"], manifest.graphs["blocks"]
        with self._lock:
            runtime = self._open.get((trunk, blocks))
            if runtime is None:
                paths = self._store.graph_path(trunk), self._store.graph_path(blocks)
                runtime = self._open[trunk, blocks] = Runtime(*paths, self._device, self._threads)
            return runtime
