"""The backbone as two ONNX graphs, exported once: they take a task as input, so that a new task needs no new graph.

    trunk    pixels (N, 3, H, W) -> tokens (N, P, d)
    blocks   tokens, w1, b1, w2, b2, norm_w, norm_b (`TaskTensors`) -> features (N, d)

N and the bottleneck B are free, everything else is fixed. The six inputs of a task have default values: the backbone's
`frozen_task()`. So `blocks` with nothing but tokens gives the frozen feature, and a server has the pre-trained norms
without torch, without another file, and in the one place that its hash vouches for.

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
EXAMPLES, UNITS = 2, 3  # sizes to trace with: a free size must not be 0 or 1, which the tracer takes for fixed


class _Blocks(nn.Module):
    """The adapted blocks with a task's tensors as plain arguments: a graph has no tuples."""

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
    # On copies: the trainer may hold the backbone on a GPU, where tracing would need its examples too.
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
        # B is the same size in three inputs, as meant; the exporter tells of it each time.
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
    if program is None:  # only the old exporter answers so
        raise RuntimeError("torch.onnx.export returned no program")
    proto: ModelProto = program.model_proto
    return proto


def _bytes(model: ModelProto) -> bytes:
    """Checked, and without what says where and by what it was made: stack traces, source paths, versions."""
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    model.producer_name, model.producer_version, graph.name = "openworld", "", "openworld"
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString(deterministic=True)
    return data
