"""The from-scratch network of the benchmark: HAT protects what earlier tasks use."""

import numpy as np
import pytest
import torch

from benchmarks.accuracy.from_scratch import CLASSES, Budget, Images, ResNet18, features, train


def made_images(seed: int, per_class: int = 6) -> Images:
    """Two classes that differ in colour."""
    pixels = 0.3 * torch.randn(CLASSES * per_class, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    labels = np.repeat(np.arange(CLASSES), per_class)
    pixels[np.arange(len(labels)), labels] += 1.0
    return Images(pixels, labels)


@pytest.mark.parametrize("contrastive", [False, True])
def test_a_later_task_does_not_change_the_features_of_an_earlier_one(contrastive: bool) -> None:
    torch.manual_seed(0)
    network, budget = ResNet18(width=2), Budget(epochs=1, steps=3, rate=0.1)
    first, second = made_images(0), made_images(1)
    train(network, 0, first, contrastive, budget, seed=0)
    before = features(network, first.pixels, 0)
    weights = network.blocks[0].first.weight.detach().clone()
    train(network, 1, second, contrastive, budget, seed=0)
    assert not torch.equal(network.blocks[0].first.weight, weights)
    assert np.array_equal(features(network, first.pixels, 0), before)
