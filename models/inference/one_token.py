"""The adapted networks of all tasks on a backbone with one token, a CNN's pooled feature, as stacked matrix products.

The sub-layers of such a backbone are identities, so an adapted block is two LayerNorms and two adapters:

    a = LN(x),  x <- x + a + W2 relu(W1 a + b1) + b2        for each adapter

Tasks with similar numbers of units form stacks, which versions share: the network of a learned task never changes.
LayerNorm weights are multiplied into W1. The next LayerNorm removes the mean, so with v = (x - mean) / deviation, the
new x is v (deviation + weight) + W2 relu(W1 v + b1) + shift. The exported graph `blocks`
is the reference (models/network/adapted_blocks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array
from models.inference.stacked import stacked_together

EPSILON = 1e-6  # of the LayerNorms


class TaskArrays(NamedTuple):
    """The network of one task: A adapters of B bottleneck units over d dimensions."""

    w1: Array  # (A, B, d)
    b1: Array  # (A, B)
    w2: Array  # (A, d, B)
    b2: Array  # (A, d)
    norm_w: Array  # (A + 1, d); the last is the final norm
    norm_b: Array  # (A + 1, d)


class OneTokenNetworks:
    """The networks of T tasks."""

    def __init__(self, tasks: Sequence[TaskArrays]) -> None:
        self._tasks = len(tasks)
        self._stacks = [
            (group, _stack([tasks[k] for k in group.tolist()]))
            for group in stacked_together([(task.w1.shape[1],) for task in tasks])
        ]

    def features(self, pooled: Array) -> Array:
        """z of every task: (n, d) -> (T, n, d)."""
        if len(self._stacks) == 1:
            return self._stacks[0][1].features(pooled)
        out = np.empty((self._tasks, *pooled.shape), np.float32)
        for group, stack in self._stacks:
            out[group] = stack.features(pooled)
        return out


class _Adapter(NamedTuple):
    """One adapter of G tasks, and the LayerNorm before it. Its last unit is always 1, and W2 has the shift there."""

    w1: Array  # (G, B + 1, d)
    b1: Array  # (G, 1, B + 1)
    w2: Array  # (G, B + 1, d)
    weight: Array  # (G, 1, d), of the LayerNorm

    def units(self, v: Array) -> Array:
        """(G, n, B + 1), from v (G, n, d), or (1, n, d) if it is the same for all tasks."""
        if len(v) == 1:  # one product is faster than G small ones
            g, b, d = self.w1.shape
            out: Array = (v[0] @ self.w1.reshape(g * b, d).T).reshape(-1, g, b).transpose(1, 0, 2)
        else:
            out = v @ self.w1.transpose(0, 2, 1)
        out += self.b1
        np.maximum(out, 0, out=out)
        return out


@dataclass(frozen=True, eq=False)
class _Stack:
    tasks: Sequence[TaskArrays]  # G
    adapters: list[_Adapter]
    norm_w: Array  # (G, 1, d)
    norm_b: Array  # (G, 1, d)

    def features(self, pooled: Array) -> Array:
        """(n, d) -> (G, n, d). Large arrays are changed in place: new ones would cost as much as the arithmetic."""
        x = np.array(pooled[None], np.float32)
        skip = np.empty((len(self.tasks), *pooled.shape), np.float32)
        for adapter in self.adapters:
            deviation = _normalise(x)
            branch = adapter.units(x) @ adapter.w2
            np.add(adapter.weight, deviation, out=skip)
            skip *= x
            branch += skip
            x = branch
        _normalise(x)
        x *= self.norm_w
        x += self.norm_b
        return x


def _normalise(x: Array) -> Array:
    """Scale to mean 0 and variance 1 in place; returns the deviation: (G, n, 1)."""
    x -= x.mean(axis=-1, keepdims=True)
    variance = np.einsum("gnd,gnd->gn", x, x)[..., None] / np.float32(x.shape[-1])
    deviation: Array = np.sqrt(variance + np.float32(EPSILON))
    x *= 1 / deviation
    return deviation


def _active(task: TaskArrays) -> NDArray[np.bool_]:
    """The units that have an effect: (A, B)."""
    out: NDArray[np.bool_] = np.abs(task.w2).max(axis=1) > 0
    return out


def _stack(tasks: Sequence[TaskArrays]) -> _Stack:
    identity = tuple(id(array) for task in tasks for array in task)
    if (found := _stacks.get(identity)) is None:
        found = _stacks[identity] = _new_stack(tasks)
    return found


# By the identity of their tasks' arrays, which a stack keeps alive.
_stacks: WeakValueDictionary[tuple[int, ...], _Stack] = WeakValueDictionary()


def _new_stack(tasks: Sequence[TaskArrays]) -> _Stack:
    count, d = tasks[0].b2.shape
    active = [_active(task) for task in tasks]
    width = max(int(units.sum(axis=1).max()) for units in active) + 1
    adapters = []
    for index in range(count):
        w1, w2 = (np.zeros((len(tasks), width, d), np.float32) for _ in range(2))
        b1, weight = np.zeros((len(tasks), 1, width), np.float32), np.zeros((len(tasks), 1, d), np.float32)
        for g, (task, units) in enumerate(zip(tasks, active, strict=True)):
            own = np.flatnonzero(units[index])
            kept = task.w1[index][own]
            w1[g, : len(own)] = kept * task.norm_w[index]
            b1[g, 0, : len(own)] = task.b1[index][own] + kept @ task.norm_b[index]
            w2[g, : len(own)] = task.w2[index][:, own].T
            b1[g, 0, -1], w2[g, -1] = 1.0, task.b2[index] + task.norm_b[index]
            weight[g, 0] = task.norm_w[index]
        adapters.append(_Adapter(w1, b1, w2, weight))
    norms = (np.stack([getattr(task, name)[-1] for task in tasks])[:, None] for name in ("norm_w", "norm_b"))
    return _Stack(tasks, adapters, *norms)
