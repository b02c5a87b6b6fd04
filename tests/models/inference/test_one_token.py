"""The stacked networks of a CNN's tasks give the features of the exported graph, task by task."""

import numpy as np
import pytest
import torch

from models.inference.model import Adapters, Model, TaskModel
from models.inference.one_token import EPSILON, OneTokenNetworks
from models.inference.stacked import STACKED_TASKS
from models.network.adapted_blocks import AdaptedBlock, AdaptedBlocks, IdentityAttention, tensors_of
from tests.support.exported import Exported, random_pixels, random_task
from tests.support.tiny_model import tiny_learner


def blocks_of(count: int) -> AdaptedBlocks:
    return AdaptedBlocks([AdaptedBlock(IdentityAttention(), torch.nn.Identity()) for _ in range(count)], EPSILON)


def some_task(rng: np.random.Generator, adapters: int, units: int, d: int = 20) -> TaskModel:
    """Random tensors; about a third of the units is unused, as in a folded copy of wider adapters."""
    shapes = [(adapters, units, d), (adapters, units), (adapters, d, units), (adapters, d)]
    w1, b1, w2, b2 = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in shapes)
    used = (rng.random((adapters, units)) > 1 / 3).astype(np.float32)
    arrays = Adapters(w1 * used[:, :, None], b1 * used, w2 * used[:, None, :], b2)
    norm_w, norm_b = (rng.normal(mean, 0.3, (adapters + 1, d)).astype(np.float32) for mean in (1, 0))
    return TaskModel(("x",), arrays, norm_w, norm_b, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("blocks", [1, 3])
def test_stacked_networks_give_the_features_of_each_task(blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    tasks = [some_task(rng, 2 * blocks, units) for units in (1, 6, 7, 40, 5, 8)]
    pooled = rng.normal(0, 1, (9, 20)).astype(np.float32)
    found = OneTokenNetworks([task.network for task in tasks]).features(pooled)
    with torch.inference_mode():
        tokens = torch.from_numpy(pooled)[:, None]
        expected = [blocks_of(blocks)(tokens, tensors_of(task)).numpy() for task in tasks]
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-4)


def test_a_version_with_a_further_task_shares_the_full_stacks() -> None:
    rng = np.random.default_rng(0)
    networks = [some_task(rng, 2, 6).network for _ in range(STACKED_TASKS + 2)]
    before, after = OneTokenNetworks(networks[:-1]), OneTokenNetworks(networks)
    assert after._stacks[0][1] is before._stacks[0][1]
    assert after._stacks[1][1] is not before._stacks[1][1]
    pooled = rng.normal(0, 1, (4, 20)).astype(np.float32)
    alone = [OneTokenNetworks([network]).features(pooled)[0] for network in networks]
    np.testing.assert_allclose(after.features(pooled), np.stack(alone), atol=1e-4)


def test_a_task_without_active_units_is_served() -> None:
    rng = np.random.default_rng(0)
    task = some_task(rng, 2, 3)
    nothing = Adapters(
        *(np.zeros_like(array) for array in (task.adapters.w1, task.adapters.b1, task.adapters.w2)), task.adapters.b2
    )
    task = TaskModel(task.classes, nothing, task.norm_w, task.norm_b, task.head, task.gaussians)
    pooled = rng.normal(0, 1, (2, 20)).astype(np.float32)
    with torch.inference_mode():
        expected = blocks_of(1)(torch.from_numpy(pooled)[:, None], tensors_of(task)).numpy()
    np.testing.assert_allclose(OneTokenNetworks([task.network]).features(pooled)[0], expected, atol=1e-4)


def test_the_runtime_serves_a_cnn_as_its_graph_does(lite0: Exported) -> None:
    runtime, pixels = lite0.runtime, random_pixels(lite0.backbone, 3)
    tasks = tuple(random_task(lite0.backbone, units, seed) for seed, units in enumerate((3, 17, 64)))
    empty = tiny_learner().empty()
    model = Model(empty.shared, tasks, empty.frozen, empty.rule, empty.novelty)
    tokens = runtime.tokens(pixels)
    expected = np.stack([runtime.task_features(tokens, task) for task in tasks])
    found = runtime.features(model, pixels).tasks
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=1e-5 * scale + 1e-4)
