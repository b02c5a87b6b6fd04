"""The scale on which the inbox compares embeddings follows the closed-form statistics of the active version."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import numpy as np
import pytest

from models.images import DEFAULT_LIMITS
from models.inference.frozen import FrozenStatistics
from models.inference.predictor import Predictor
from service.inbox_access import InboxAccess
from service.inference.embedding_scale import embedding_scale, scale_of
from service.inference.servable import EmptyModel
from tests.support.servers import learned_folder


@pytest.mark.parametrize("length", [1.0, 7.0])
def test_dimensions_that_vary_within_classes_count_little(length: float) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 50)
    spread = np.array([0.01, 0.01, 0.1, 0.1])
    features = rng.normal([0.5, 0.5, 0.5, 0.5], spread, (200, 4)) + 0.1 * np.eye(4)[labels]
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    scale = scale_of(FrozenStatistics.fit(length * features, features, labels, 4))
    means = [features[labels == c].mean(axis=0) for c in range(4)]
    np.testing.assert_allclose(scale.centre, np.mean(means, axis=0), rtol=1e-3)  # of features of length 1
    assert scale.weights[:2].min() > 3 * scale.weights[2:].max()


def test_one_image_per_class_has_no_spread() -> None:
    scale = scale_of(FrozenStatistics.fit(np.eye(3), np.eye(3), np.arange(3), 3))
    assert scale.weights.tolist() == [1.0, 1.0, 1.0]


def test_the_scale_is_that_of_the_version(tmp_path: Path) -> None:
    assert embedding_scale(EmptyModel(DEFAULT_LIMITS)) is None
    predictor = Predictor.open(learned_folder(tmp_path / "robot"), threads=1)
    scale = embedding_scale(predictor)
    assert scale is not None
    np.testing.assert_array_equal(scale.weights, scale_of(predictor.model.frozen).weights)


def test_a_replaced_version_is_freed_also_if_no_novelty_follows(tmp_path: Path) -> None:
    active = SimpleNamespace(model=Predictor.open(learned_folder(tmp_path / "robot"), threads=1))
    access = cast(Any, SimpleNamespace(_active_version=active, _scaled=(lambda: None, None)))
    assert InboxAccess._embedding_scale(access) is InboxAccess._embedding_scale(access) is not None
    gone = ref(active.model)
    active.model = EmptyModel(DEFAULT_LIMITS)
    gc.collect()
    assert gone() is None
    assert InboxAccess._embedding_scale(access) is None
