"""The backbone as two ONNX graphs, exported once: they take a task as input, so a new task needs no new graph.

    trunk    pixels (N, 3, H, W) -> tokens (N, P, d)
    blocks   tokens, w1, b1, w2, b2, norm_w, norm_b (`TaskTensors`) -> features (N, d)

The sizes N and B (bottleneck) are dynamic, all others are fixed. The six inputs of a task have the backbone's
`frozen_task()` as default values, so `blocks` with tokens as its only input gives the frozen feature.

**The same backbone gives the same bytes**, in any process and in any folder: the graphs are stored by their hash.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import onnx
import torch
from onnx import ModelProto, numpy_helper
from torch import Tensor, nn
from torch.export import Dim

from models.network.adapted_blocks import AdaptedBlocks, TaskTensors
from models.network.backbone import Backbone

OPSET = 18
EXAMPLES, UNITS = 2, 3  # dynamic sizes while tracing; the tracer treats 0 and 1 as fixed


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


def export(backbone: Backbone) -> dict[str, bytes]:
    """The graphs by role, `trunk` and `blocks`, weights included."""
    # Copies on the CPU: the trainer may use the backbone on a GPU.
    trunk, blocks = (copy.deepcopy(part).cpu().eval() for part in (backbone.trunk, _Blocks(backbone.blocks)))
    crop = backbone.spec.preprocessing.crop
    pixels = torch.zeros(EXAMPLES, 3, crop, crop)
    with torch.inference_mode():
        tokens = trunk(pixels)
    frozen = TaskTensors(*(tensor.cpu() for tensor in backbone.frozen_task()))
    a, d = backbone.adapters, backbone.spec.dimensions
    task = frozen._replace(w1=torch.zeros(a, UNITS, d), b1=torch.zeros(a, UNITS), w2=torch.zeros(a, d, UNITS))
    n, b = Dim("N"), Dim("B")
    free = TaskTensors({1: b}, {1: b}, {2: b}, None, None, None)  # type: ignore[arg-type]
    trunk_graph = _trace(trunk, {"pixels": pixels}, ({0: n},), "tokens")
    blocks_graph = _trace(blocks, {"tokens": torch.zeros(tokens.shape), **task._asdict()}, ({0: n}, *free), "features")
    for name, tensor in frozen._asdict().items():
        blocks_graph.graph.initializer.append(numpy_helper.from_array(tensor.numpy(), name))
    return {"trunk": _bytes(trunk_graph), "blocks": _bytes(blocks_graph)}


def _trace(module: nn.Module, inputs: dict[str, Tensor], free: tuple[Any, ...], output: str) -> ModelProto:
    with warnings.catch_warnings():
        # B is the size of three inputs on purpose; the exporter warns about each.
        warnings.filterwarnings("ignore", message=".*The axis name: B will not be used", category=UserWarning)
        program = torch.onnx.export(
            module,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=[output],
            dynamic_shapes=free,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    if program is None:  # returned by the old exporter only
        raise RuntimeError("torch.onnx.export returned no program")
    proto: ModelProto = program.model_proto
    return proto


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
