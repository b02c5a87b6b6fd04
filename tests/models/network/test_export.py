"""The exported graphs: dynamic sizes, documented inputs, and the same bytes from every process."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from models.inference.runtime import ROLES
from models.network.adapted_blocks import TaskTensors, frozen_task, tensors_of
from tests.support.exported import TOLERANCE, Exported, random_backbone, random_pixels, random_task
from tests.support.paths import ROOT


@pytest.mark.parametrize("bottleneck", [1, 5, 64])
@pytest.mark.parametrize("which", ["small", "lite0"])
def test_one_graph_takes_adapters_of_any_width(which: str, bottleneck: int, request: pytest.FixtureRequest) -> None:
    exported: Exported = request.getfixturevalue(which)
    task = random_task(exported.backbone, bottleneck)
    for count in (1, 3):
        pixels = random_pixels(exported.backbone, count)
        tokens = exported.runtime.tokens(pixels)
        with torch.inference_mode():
            reference = exported.backbone.trunk(torch.from_numpy(pixels))
            expected = exported.backbone.blocks(reference, tensors_of(task)).numpy()
        features = exported.runtime.task_features(tokens, task)
        assert features.shape == (count, exported.backbone.spec.dimensions)
        np.testing.assert_allclose(features, expected, atol=TOLERANCE)
        # The adapters change the feature, so that the comparison is meaningful.
        norms = exported.backbone.norm_w, exported.backbone.norm_b
        with torch.inference_mode():
            plain = exported.backbone.blocks(reference, frozen_task(*norms)).numpy()
        assert np.abs(features - plain).max() > 0.1


def test_all_blocks_of_a_transformer_can_be_adapted(tmp_path: Path) -> None:
    exported = Exported.of(random_backbone(tmp_path, "tiny_test_vit", 3))
    task, pixels = random_task(exported.backbone, 5), random_pixels(exported.backbone, 3)
    with torch.inference_mode():
        tokens = exported.backbone.trunk(torch.from_numpy(pixels))
        expected = exported.backbone.blocks(tokens, tensors_of(task)).numpy()
    np.testing.assert_allclose(
        exported.runtime.task_features(exported.runtime.tokens(pixels), task), expected, atol=TOLERANCE
    )


def sha256s(graphs: Mapping[str, bytes]) -> dict[str, str]:
    return {role: hashlib.sha256(data).hexdigest() for role, data in graphs.items()}


EXPORT = """
import hashlib, sys
from pathlib import Path
from models.network.backbone import open_backbone
from models.network.export import export
from tests.support.exported import SCENE_TASKS, learn, read_scene

backbone = open_backbone(Path(sys.argv[1]))
assert len(learn(backbone, SCENE_TASKS, read_scene, epochs=1).tasks) == 2
print({role: hashlib.sha256(data).hexdigest() for role, data in export(backbone).items()})
"""


def test_another_process_that_has_learned_tasks_exports_the_same_bytes(small: Exported, tmp_path: Path) -> None:
    random_backbone(tmp_path, "tiny_test_vit", 2)  # the weights of `small` in another folder
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", EXPORT, str(tmp_path / "data")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == str(sha256s(small.graphs))


@pytest.mark.parametrize("which", ["small", "lite0"])
def test_a_graph_contains_no_trace_of_the_machine_that_made_it(which: str, request: pytest.FixtureRequest) -> None:
    exported: Exported = request.getfixturevalue(which)
    traces = [
        str(ROOT),
        sys.prefix,
        "site-packages",
        "adapted_blocks.py",
        "stack_trace",
        torch.__version__,
    ]
    for role, data in exported.graphs.items():
        assert [trace for trace in traces if trace.encode() in data] == [], role


def test_the_graphs_have_the_documented_inputs_and_outputs(small: Exported) -> None:
    def shapes(values: Sequence[onnx.ValueInfoProto]) -> dict[str, list[str | int]]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    trunk, blocks, frozen = (onnx.load_from_string(small.graphs[role]) for role in ROLES)
    assert shapes(trunk.graph.input) == {"pixels": ["N", 3, 64, 64]}
    assert shapes(trunk.graph.output) == {"tokens": ["N", 17, 32]}
    task = dict(
        zip(TaskTensors._fields, ([4, "B", 32], [4, "B"], [4, 32, "B"], [4, 32], [5, 32], [5, 32]), strict=True)
    )
    assert shapes(blocks.graph.input) == {"tokens": ["N", 17, 32], **task}
    assert shapes(blocks.graph.output) == {"features": ["N", 32]}
    assert shapes(frozen.graph.input) == {"tokens": ["N", 17, 32]}
    assert shapes(frozen.graph.output) == {"feature": ["N", 64], "expanded": ["N", 1024]}
    # Without a default value, a missing input is an error.
    assert {weight.name for weight in blocks.graph.initializer}.isdisjoint(shapes(blocks.graph.input))
    assert all(entry.version >= 17 for graph in (trunk, blocks, frozen) for entry in graph.opset_import)
