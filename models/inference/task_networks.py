"""The networks of a transformer's tasks, run for chosen pairs of an image and a task in one call of a graph.

The arrays of all tasks are stacked once per model. On a GPU they are copied to the device once, and a call sends only
the numbers of the pairs: the trunk's tokens stay on the device too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from models.inference.evidence import Array
from models.inference.one_token import TaskArrays

Tokens: TypeAlias = Any  # an array, or an OrtValue on the session's device; ONNX Runtime has no types
PAIR_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # the pairs of a call are padded to one of these


class StackedNetworks:
    """The arrays of T tasks, with the task as the second axis; narrow adapters are padded with units of no effect."""

    def __init__(self, tasks: Sequence[TaskArrays]) -> None:
        width = max(task.w1.shape[1] for task in tasks)
        padded = [_padded(task, width) for task in tasks]
        self.arrays: dict[str, Array] = {
            name: np.stack([getattr(task, name) for task in padded], axis=1) for name in TaskArrays._fields
        }


def _padded(task: TaskArrays, width: int) -> TaskArrays:
    extra = width - task.w1.shape[1]
    return task._replace(
        w1=np.pad(task.w1, ((0, 0), (0, extra), (0, 0))),
        b1=np.pad(task.b1, ((0, 0), (0, extra))),
        w2=np.pad(task.w2, ((0, 0), (0, 0), (0, extra))),
    )


class SelectedGraph:
    """The graph `selected` (models/network/export.py) on one device. Thread-safe."""

    def __init__(self, session: onnxruntime.InferenceSession, device: str) -> None:
        self._session, self._device = session, device
        self._on_device: WeakKeyDictionary[StackedNetworks, dict[str, onnxruntime.OrtValue]] = WeakKeyDictionary()

    def features(self, tokens: Tokens, networks: StackedNetworks, chosen: NDArray[np.bool_]) -> Array:
        """z of every task that is chosen (n, T), 0 elsewhere: (T, n, d)."""
        out = np.zeros((*chosen.T.shape, networks.arrays["b2"].shape[-1]), np.float32)
        images, tasks = np.nonzero(chosen)
        for start in range(0, len(images), PAIR_SIZES[-1]):
            image, task = (index[start : start + PAIR_SIZES[-1]] for index in (images, tasks))
            # The last pairs are repeated up to a size that has been used before: a GPU compiles kernels for each size.
            size = next(size for size in PAIR_SIZES if size >= len(image))
            pairs = {"image": np.resize(image, size), "task": np.resize(task, size)}
            out[task, image] = self._run(tokens, pairs, networks)[: len(image)]
        return out

    def _run(self, tokens: Tokens, pairs: Mapping[str, NDArray[np.int64]], networks: StackedNetworks) -> Array:
        if isinstance(tokens, np.ndarray):
            out: Array = self._session.run(["features"], {"tokens": tokens, **pairs, **networks.arrays})[0]
            return out
        feeds = {"tokens": tokens, **self._resident(networks)}
        bound: Array = run_bound(self._session, self._device, ["features"], feeds, pairs, keep=False)[0]
        return bound

    def _resident(self, networks: StackedNetworks) -> dict[str, onnxruntime.OrtValue]:
        """The arrays on the device; copied there at the first call and freed with the model."""
        found = self._on_device.get(networks)
        if found is None:
            found = self._on_device[networks] = {
                name: onnxruntime.OrtValue.ortvalue_from_numpy(array, self._device, 0)
                for name, array in networks.arrays.items()
            }
        return found


def run_bound(
    session: onnxruntime.InferenceSession,
    device: str,
    outputs: Sequence[str],
    resident: Mapping[str, onnxruntime.OrtValue],
    sent: Mapping[str, NDArray[Any]],
    keep: bool,
) -> list[Any]:
    """Run a graph with inputs that are on the device and inputs that are sent to it.

    With `keep`, the outputs stay on the device as OrtValues; without it, they are arrays.
    """
    binding = session.io_binding()
    for name, value in resident.items():
        binding.bind_ortvalue_input(name, value)
    for name, array in sent.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    for name in outputs:
        binding.bind_output(name, device if keep else "cpu")
    session.run_with_iobinding(binding)
    found = list(binding.get_outputs())
    return found if keep else [value.numpy() for value in found]
