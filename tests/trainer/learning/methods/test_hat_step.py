"""One step of HAT: what it changes, what it protects, and what it clips."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.inference.model import SharedAdapters
from models.network import hat
from models.network.backbone import Backbone
from tests.support.tiny_model import DIMENSIONS, TinyImages, any_tokens, tiny_backbone, tiny_settings
from trainer.learning.adapter_units import initial_adapters
from trainer.learning.methods.hat import ADAPTER_TENSORS, HatNetwork
from trainer.learning.methods.replay import ReplayObjective
from trainer.learning.methods.shards import gradient
from trainer.learning.tokens import TokenCache


def half_used(seed: int = 0) -> SharedAdapters:
    rng = np.random.default_rng(seed)
    start = initial_adapters(tiny_backbone().adapters, DIMENSIONS, tiny_settings())
    used1 = rng.integers(0, 2, start.used1.shape).astype(np.float32)
    return SharedAdapters(start.adapters, used1, rng.integers(0, 2, start.used2.shape).astype(np.float32))


def take_step(network: HatNetwork, loss: Tensor) -> None:
    network.step(gradient(network.parameters, loss).by_name)


def loss_of(network: HatNetwork, backbone: Backbone, labels: Tensor) -> Tensor:
    z = backbone.blocks(any_tokens(), network.tensors, network.masks(1.0))
    return F.cross_entropy(F.linear(z, network.parameters["head_w"], network.parameters["head_b"]), labels)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.1]))
def test_a_step_changes_free_entries_and_no_bit_of_protected_ones(seed: int, momentum: float, decay: float) -> None:
    backbone, shared = tiny_backbone(), half_used(seed)
    chosen = tiny_settings(momentum=momentum, weight_decay=decay, learning_rate=0.1)
    network = HatNetwork(TokenCache(backbone, TinyImages().read), shared, 2, chosen, "test", ReplayObjective())
    start = {key: network.parameters[key].detach().clone() for key in ADAPTER_TENSORS}
    for step in range(15):
        loss = loss_of(network, backbone, torch.tensor([0, 1, 2, step % 3]))
        # A gradient for every entry: a unit that no input activates has none of its own.
        take_step(network, loss + 0.1 * sum(network.parameters[key].sum() for key in ADAPTER_TENSORS))
    protected = hat.protection(torch.tensor(shared.used1), torch.tensor(shared.used2))
    for key in ADAPTER_TENSORS:
        kept = protected[key].expand_as(start[key])
        now = network.parameters[key].detach()
        assert torch.equal(now[kept], start[key][kept]), key
        assert (now[~kept] != start[key][~kept]).all(), key


def test_existing_momentum_does_not_change_protected_entries() -> None:
    backbone, shared = tiny_backbone(), half_used()
    network = HatNetwork(
        TokenCache(backbone, TinyImages().read),
        shared,
        2,
        tiny_settings(momentum=0.9, weight_decay=0.1),
        "test",
        ReplayObjective(),
    )
    state = network.state()
    network.restore(state | {f"momentum.{key}": np.ones_like(value) for key, value in state.items()})
    before = {key: network.parameters[key].detach().clone() for key in ADAPTER_TENSORS}
    take_step(network, network.parameters["head_b"].sum())  # a loss that does not depend on the adapters
    for key in ADAPTER_TENSORS:
        kept = network.protected[key].expand_as(before[key])
        assert torch.equal(network.parameters[key].detach()[kept], before[key][kept])


def test_weight_decay_changes_weights_but_no_masks_norms_or_biases() -> None:
    backbone, shared = tiny_backbone(), half_used()
    chosen = tiny_settings(momentum=0.0, weight_decay=0.1, learning_rate=0.5)
    network = HatNetwork(TokenCache(backbone, TinyImages().read), shared, 2, chosen, "test", ReplayObjective())
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


def test_embeddings_are_clipped_to_where_the_sigmoid_has_a_gradient() -> None:
    backbone = tiny_backbone()
    network = HatNetwork(
        TokenCache(backbone, TinyImages().read),
        half_used(),
        2,
        tiny_settings(learning_rate=10.0),
        "test",
        ReplayObjective(),
    )
    for _ in range(5):
        take_step(network, loss_of(network, backbone, torch.tensor([0, 1, 2, 0])))
    for key in ("e1", "e2"):
        assert network.parameters[key].abs().max() <= 6
