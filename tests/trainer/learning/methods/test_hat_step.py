"""One step of HAT: what it changes, what it protects, and what it clips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.inference.model import SharedAdapters
from models.network import hat
from models.network.adapted_blocks import frozen_task
from models.network.backbone import Backbone
from tests.support.tiny_model import DIMENSIONS, TinyImages, any_tokens, tiny_backbone, tiny_cnn, tiny_settings
from trainer.learning.adapter_units import initial_adapters
from trainer.learning.methods import TaskData
from trainer.learning.methods.hat import ADAPTER_TENSORS, HatNetwork
from trainer.learning.methods.replay import ReplayObjective
from trainer.learning.methods.shards import gradient
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

STARTS = ("random", "closed form")  # trained by SGD and by Adam
ADAM = ["exp_avg", "exp_avg_sq"]


def half_used(seed: int = 0) -> SharedAdapters:
    rng = np.random.default_rng(seed)
    start = initial_adapters(tiny_backbone().adapters, DIMENSIONS, tiny_settings())
    used1 = rng.integers(0, 2, start.used1.shape).astype(np.float32)
    adapters = replace(start.adapters, b2=rng.standard_normal(start.used2.shape).astype(np.float32))
    return SharedAdapters(adapters, used1, rng.integers(0, 2, start.used2.shape).astype(np.float32))


def network_of(shared: SharedAdapters, **chosen: Any) -> HatNetwork:
    """Of a task with two classes."""
    keys = [key for keys in TinyImages().batch(["a", "b"], count=4).values() for key in keys]
    data = TaskData(keys, np.repeat([0, 1], 4).tolist(), 2, [])
    tokens = TokenCache(tiny_backbone(), TinyImages().read)
    return HatNetwork(tokens, shared, data, tiny_settings(**chosen), "test", ReplayObjective())


def take_step(network: HatNetwork, loss: Tensor) -> None:
    network.step(gradient(network.parameters, loss).by_name)


def loss_of(network: HatNetwork, labels: Tensor) -> Tensor:
    z = network.tokens.backbone.blocks(any_tokens(), network.tensors, network.masks(1.0))
    return F.cross_entropy(F.linear(z, network.parameters["head_w"], network.parameters["head_b"]), labels)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.1]), st.sampled_from(STARTS))
def test_a_step_changes_free_entries_and_no_bit_of_protected_ones(
    seed: int, momentum: float, decay: float, beginning: str
) -> None:
    shared = half_used(seed)
    network = network_of(shared, start=beginning, momentum=momentum, weight_decay=decay, learning_rate=0.1)
    start = {key: network.parameters[key].detach().clone() for key in ADAPTER_TENSORS}
    for step in range(15):
        loss = loss_of(network, torch.tensor([0, 1, 2, step % 3]))
        # A gradient for every entry: a unit that no input activates has none of its own.
        take_step(network, loss + 0.1 * sum(network.parameters[key].sum() for key in ADAPTER_TENSORS))
    protected = hat.protection(torch.tensor(shared.used1), torch.tensor(shared.used2))
    for key in ADAPTER_TENSORS:
        kept = protected[key].expand_as(start[key])
        now = network.parameters[key].detach()
        assert torch.equal(now[kept], start[key][kept]), key
        assert (now[~kept] != start[key][~kept]).all(), key


@pytest.mark.parametrize(("beginning", "kept_by_optimiser"), [("random", ["momentum_buffer"]), ("closed form", ADAM)])
def test_existing_momentum_does_not_change_protected_entries(beginning: str, kept_by_optimiser: list[str]) -> None:
    network = network_of(half_used(), start=beginning, momentum=0.9, weight_decay=0.1)
    state = network.state()
    moving = {f"{name}.{key}": np.ones_like(value) for name in kept_by_optimiser for key, value in state.items()}
    steps = {f"step.{key}": np.ones((), np.float32) for key in state} if kept_by_optimiser == ADAM else {}
    network.restore(state | moving | steps)
    before = {key: network.parameters[key].detach().clone() for key in ADAPTER_TENSORS}
    take_step(network, 0.0 * sum(network.parameters[key].sum() for key in ADAPTER_TENSORS))  # no gradient of its own
    for key in ADAPTER_TENSORS:
        kept, now = network.protected[key].expand_as(before[key]), network.parameters[key].detach()
        assert torch.equal(now[kept], before[key][kept])
        assert (now[~kept] != before[key][~kept]).all()


@pytest.mark.parametrize("beginning", STARTS)
def test_weight_decay_changes_weights_but_no_masks_norms_or_biases(beginning: str) -> None:
    network = network_of(half_used(), start=beginning, momentum=0.0, weight_decay=0.1, learning_rate=0.5)
    with torch.no_grad():  # biases start at zero, where decay has no effect
        for parameter in network.parameters.values():
            parameter += 0.5
    before = {key: value.detach().clone() for key, value in network.parameters.items()}
    take_step(network, 0.0 * sum(value.sum() for value in network.parameters.values()))  # all gradients are zero
    for key, old in before.items():
        kept = network.protected[key].expand_as(old) if key in network.protected else torch.zeros_like(old, dtype=bool)
        decayed = key in ("w1", "w2", "head_w")
        expected = (
            torch.where(kept, old, old * (1 - 0.5 * 0.1))
            if decayed
            else old.clamp(-6, 6)
            if key in ("e1", "e2")
            else old
        )
        torch.testing.assert_close(network.parameters[key].detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("beginning", STARTS)
def test_embeddings_are_clipped_to_where_the_sigmoid_has_a_gradient(beginning: str) -> None:
    network = network_of(half_used(), start=beginning, learning_rate=10.0)
    for _ in range(5):
        take_step(network, loss_of(network, torch.tensor([0, 1, 2, 0])))
    for key in ("e1", "e2"):
        assert network.parameters[key].abs().max() <= 6


def test_a_refined_network_starts_as_the_frozen_one_with_a_solved_head() -> None:
    network = network_of(initial_adapters(tiny_backbone().adapters, DIMENSIONS, tiny_settings()))
    backbone, parameters = network.tokens.backbone, network.parameters
    frozen = backbone.blocks(any_tokens(), frozen_task(backbone.norm_w, backbone.norm_b))
    assert torch.equal(backbone.blocks(any_tokens(), network.tensors, network.masks(1.0)), frozen)
    keys = [key for keys in TinyImages().batch(["a", "b"], count=4).values() for key in keys]
    z = network.tokens.features(keys, frozen_task(backbone.norm_w, backbone.norm_b))
    logits = z @ parameters["head_w"].detach().numpy().T + parameters["head_b"].detach().numpy()
    assert logits.argmax(axis=1).tolist() == [0] * 4 + [1] * 4


def test_units_of_earlier_tasks_stay_where_a_refined_network_starts() -> None:
    shared = half_used()
    protected = hat.protection(torch.tensor(shared.used1), torch.tensor(shared.used2))
    parameters = network_of(shared).parameters
    for key in ("w2", "b2"):
        own, kept = parameters[key].detach(), protected[key]
        assert torch.equal(own[kept], torch.tensor(getattr(shared.adapters, key))[kept]), key
        assert not own[~kept].any(), key


@pytest.mark.parametrize("beginning", STARTS)
def test_a_restored_network_goes_on_as_the_one_that_was_saved(beginning: str) -> None:
    network, restored = (network_of(half_used(), start=beginning) for _ in range(2))
    labels = torch.tensor([0, 1, 2, 0])
    take_step(network, loss_of(network, labels))
    restored.restore(network.state())
    for one in (network, restored):
        take_step(one, loss_of(one, labels))
    for key, value in network.state().items():
        np.testing.assert_array_equal(restored.state()[key], value, err_msg=key)


@pytest.mark.parametrize(
    ("backbone", "chosen", "starts_at_closed_form"),
    [(tiny_backbone(), {}, True), (tiny_backbone(), {"preset": "paper"}, False), (tiny_cnn(), {}, False)],
)
def test_the_network_of_a_cnn_and_that_of_the_paper_start_at_random(
    backbone: Backbone, chosen: dict[str, Any], starts_at_closed_form: bool
) -> None:
    assert ReplayObjective().starts_at_closed_form(backbone, LearnerSettings(**chosen)) is starts_at_closed_form
