"""The backbone as ONNX graphs, exported once: a task is an input, so a new task needs no new graph.

    trunk      pixels (N, 3, H, W) -> tokens (N, P, d), for a CNN (N, 1, f)
    blocks     tokens, w1, b1, w2, b2, norm_w, norm_b (`TaskTensors`) -> features (N, d)
    frozen     tokens -> feature (N, f), expanded (N, M)
    selected   tokens, image, task, w1, ... (`SelectedBlocks`) -> features (S, d); transformers only
    tail       map (N, c, h, w), gain.0, ... (`Tail`) -> features (N, r); a CNN that is cut, whose trunk also gives map

The sizes N, B (bottleneck), T (tasks) and S (pairs of image and task) are dynamic, all others are fixed.

**The same backbone gives the same bytes**, in any process and in any folder: the graphs are stored by their hash.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import onnx
import torch
from onnx import ModelProto
from torch import Tensor, nn
from torch.export import Dim

from models.network.adapted_blocks import AdaptedBlocks, SelectedBlocks, TaskTensors
from models.network.backbone import Backbone

OPSET = 18
EXAMPLES, UNITS, TASKS, PAIRS = 2, 3, 4, 5  # dynamic sizes while tracing; the tracer treats 0 and 1 as fixed


class _Selected(nn.Module):
    """`SelectedBlocks` with named arguments, as `_Blocks`."""

    def __init__(self, blocks: AdaptedBlocks) -> None:
        super().__init__()
        self.blocks = SelectedBlocks(blocks)

    def forward(
        self,
        tokens: Tensor,
        image: Tensor,
        task: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        norm_w: Tensor,
        norm_b: Tensor,
    ) -> Tensor:
        out: Tensor = self.blocks(tokens, image, task, w1, b1, w2, b2, norm_w, norm_b)
        return out


class _Blocks(nn.Module):
    """The adapted blocks with a task's tensors as separate arguments: a graph has no tuples."""

    def __init__(self, blocks: AdaptedBlocks) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(
        self, tokens: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, norm_w: Tensor, norm_b: Tensor
    ) -> Tensor:
        out: Tensor = self.blocks(tokens, TaskTensors(w1, b1, w2, b2, norm_w, norm_b))
        return out


class _TrunkWithMap(nn.Module):
    """A CNN's trunk with both of its outputs."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.trunk.with_map(pixels)
        return out


def export(backbone: Backbone) -> dict[str, bytes]:
    """The graphs by role, weights included."""
    # Copies on the CPU: the trainer may use the backbone on a GPU.
    parts = (backbone.trunk, _Blocks(backbone.blocks), backbone.frozen)
    trunk, blocks, frozen = (copy.deepcopy(part).cpu().eval() for part in parts)
    crop = backbone.spec.preprocessing.crop
    pixels = torch.zeros(EXAMPLES, 3, crop, crop)
    with torch.inference_mode():
        tokens = {"tokens": torch.zeros(trunk(pixels).shape)}
    a, d = backbone.adapters, backbone.spec.dimensions
    shapes = TaskTensors((a, UNITS, d), (a, UNITS), (a, d, UNITS), (a, d), (a + 1, d), (a + 1, d))  # type: ignore[arg-type]
    task = {name: torch.zeros(shape) for name, shape in shapes._asdict().items()}
    n, b = Dim("N"), Dim("B")
    free = TaskTensors({1: b}, {1: b}, {2: b}, None, None, None)  # type: ignore[arg-type]
    graphs = {}
    if backbone.tail is None:
        graphs["trunk"] = _export(trunk, {"pixels": pixels}, ({0: n},), ["tokens"])
    else:
        with_map = _TrunkWithMap(trunk).eval()
        graphs["trunk"] = _export(with_map, {"pixels": pixels}, ({0: n},), ["tokens", "map"])
    graphs["blocks"] = _export(blocks, tokens | task, ({0: n}, *free), ["features"])
    graphs["frozen"] = _export(frozen, tokens, ({0: n},), ["feature", "expanded"])
    if backbone.tail is not None:
        tail = copy.deepcopy(backbone.tail).cpu().eval()
        with torch.inference_mode():
            maps = {"map": torch.zeros(with_map(pixels)[1].shape)}
        free_units = {"down": {0: b}, "down_bias": {0: b}, "up": {1: b}}  # by the part of an adapter
        units = tuple(free_units.get(name.split(".")[0]) for name in tail.names)
        graphs["tail"] = _export(tail, maps | tail.zeros(UNITS), ({0: n}, units), ["features"])
    if "selected" not in roles(backbone):
        return graphs
    pairs = {name: torch.zeros(PAIRS, dtype=torch.int64) for name in ("image", "task")}
    stacked = {name: torch.stack([tensor] * TASKS, dim=1) for name, tensor in task.items()}
    s, t = Dim("S"), Dim("T")
    of_stacked = ({1: t, 2: b}, {1: t, 2: b}, {1: t, 3: b}, {1: t}, {1: t}, {1: t})
    selected = _Selected(copy.deepcopy(backbone.blocks).cpu()).eval()
    free_sizes = ({0: n}, {0: s}, {0: s}, *of_stacked)
    return graphs | {"selected": _export(selected, tokens | pairs | stacked, free_sizes, ["features"])}


def roles(backbone: Backbone) -> tuple[str, ...]:
    """The graphs of a backbone. The tasks of a CNN are served without a graph (models/inference/one_token.py)."""
    own = () if backbone.tail is None else ("tail",)
    return ("trunk", "blocks", "frozen", *own) if backbone.one_token else ("trunk", "blocks", "frozen", "selected")


def _export(module: nn.Module, inputs: dict[str, Tensor], free: tuple[Any, ...], outputs: list[str]) -> bytes:
    with warnings.catch_warnings():
        # B, S and T are sizes of several inputs on purpose; the exporter warns about each.
        warnings.filterwarnings("ignore", message=".*The axis name: [BST] will not be used", category=UserWarning)
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=free,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    if program is None:  # returned by the old exporter only
        raise RuntimeError("torch.onnx.export returned no program")
    return _bytes(program.model_proto)


def _bytes(model: ModelProto) -> bytes:
    """Serialize a checked graph without stack traces, source paths and versions of the machine that made it."""
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    model.producer_name, model.producer_version, graph.name = "openworld", "", "openworld"
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString(deterministic=True)
    return data
