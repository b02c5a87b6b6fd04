"""The token cache: tokens are the same whether they are cached or computed again."""

from collections import Counter

import numpy as np
import pytest
import torch

from models.inference.model import Model
from models.inference.stored_model import model_tensors
from models.network.adapted_blocks import TaskTensors, frozen_task, tensors_of
from tests.support.tiny_model import (
    DIMENSIONS,
    EXPANDED,
    TOKENS,
    TinyImages,
    class_tasks,
    learn_tasks,
    tiny_backbone,
    tiny_learner,
)
from trainer.learning.forward_passes import CHUNK
from trainer.learning.learner import Learner
from trainer.learning.tokens import TokenCache

ROW = 4 * TOKENS * DIMENSIONS  # bytes of an image's tokens
KEYS = [key for keys in TinyImages().batch(["a", "b"], count=CHUNK - 5).values() for key in keys]  # not a whole chunk


def frozen() -> TaskTensors:
    backbone = tiny_backbone()
    return frozen_task(backbone.norm_w, backbone.norm_b)


class Reads:
    """Reads images and counts the reads of each."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __call__(self, key: str) -> bytes:
        self.count[key] += 1
        return TinyImages().read(key)


def tokens_of(limit: int | None) -> tuple[TokenCache, Reads]:
    reads = Reads()
    return TokenCache(tiny_backbone(), reads, **({} if limit is None else {"max_bytes": limit})), reads


@pytest.mark.parametrize("rows", [0, 1, 7, CHUNK + 1])
def test_tokens_beyond_the_limit_are_computed_again_and_equal(rows: int) -> None:
    (bounded, _), (unbounded, _) = tokens_of(rows * ROW), tokens_of(None)
    task = frozen()
    keys = [*KEYS, *KEYS[:3]]  # some twice
    views = [place % 3 for place in range(len(keys))]
    for tokens in (bounded, unbounded):
        tokens.prepare(KEYS, range(3))
    for _ in range(2):
        torch.testing.assert_close(bounded.get(keys), unbounded.get(keys), rtol=0, atol=1e-6)
        torch.testing.assert_close(bounded.get(keys, views), unbounded.get(keys, views), rtol=0, atol=1e-6)
        np.testing.assert_allclose(bounded.features(keys, task), unbounded.features(keys, task), rtol=0, atol=1e-5)
        for one, other in zip(bounded.frozen(keys), unbounded.frozen(keys), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_the_cache_keeps_no_more_than_its_limit() -> None:
    tokens, reads = tokens_of(7 * ROW)
    tokens.prepare(KEYS)
    reads.count.clear()
    tokens.get(KEYS)
    assert set(KEYS) - set(reads.count) == set(KEYS[:7])


def test_every_image_is_read_once_if_the_cache_has_room() -> None:
    tokens, reads = tokens_of(None)
    tokens.prepare(KEYS)
    tokens.get([*KEYS, *KEYS])
    tokens.features(KEYS, frozen())
    tokens.frozen(KEYS)
    assert set(reads.count.values()) == {1}
    assert set(reads.count) == set(KEYS)


def test_no_images_give_no_features() -> None:
    tokens, _ = tokens_of(0)
    assert tokens.features([], frozen()).shape == (0, DIMENSIONS)
    assert [part.shape for part in tokens.frozen([])] == [(0, 2 * DIMENSIONS), (0, EXPANDED)]


def test_cached_and_uncached_tokens_can_be_trained_on() -> None:
    for limit in (0, None):
        tokens, _ = tokens_of(limit)
        weight = torch.ones(DIMENSIONS, requires_grad=True)
        (tokens.get(KEYS[:2]) * weight).sum().backward()
        assert weight.grad is not None


def learned_with(views: int) -> tuple[Learner, Model]:
    learner = tiny_learner(views=views, epochs=8, learning_rate=0.1, sparsity=0.003)
    return learner, learn_tasks(learner, class_tasks([2], images=12))[0].model


def test_training_with_augmented_views_is_reproducible_and_learns() -> None:
    (learner, model), (_, again), (_, plain) = learned_with(3), learned_with(3), learned_with(1)
    one, other = model_tensors(model), model_tensors(again)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert not np.array_equal(plain.tasks[0].head.weight, model.tasks[0].head.weight)
    fresh = [f"class {c}/{number}" for c in range(2) for number in range(100, 120)]
    z = learner.tokens.features(fresh, tensors_of(model.tasks[0]))
    assert (model.tasks[0].head.logits(z)[:, :2].argmax(axis=1) == np.repeat([0, 1], 20)).mean() > 0.9
