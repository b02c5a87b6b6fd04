"""The scale on which the inbox compares embeddings: from the closed-form statistics of a version."""

from __future__ import annotations

import numpy as np

from models.inference.frozen import FrozenStatistics
from models.inference.predictor import Predictor
from service.inbox import EmbeddingScale
from service.inference.servable import ServableModel

LEAST_VARIANCE = 0.2  # of a dimension, relative to the mean of all dimensions


def embedding_scale(model: ServableModel) -> EmbeddingScale | None:
    """None while nothing is learned."""
    return scale_of(model.model.frozen) if isinstance(model, Predictor) else None


def scale_of(frozen: FrozenStatistics) -> EmbeddingScale:
    """The mean of the class means and the variances within classes, of features scaled to a length of about 1."""
    variances = np.diag(frozen.scatter) / frozen.freedom
    squares = frozen.counts @ (frozen.means**2).sum(axis=1) + np.trace(frozen.scatter)
    length = np.sqrt(squares / frozen.counts.sum())  # root of the mean square
    mean = float(variances.mean())
    weights = 1 / (variances / mean + LEAST_VARIANCE) if mean > 0 else np.ones_like(variances)
    return EmbeddingScale((frozen.centre / length).astype(np.float32), weights.astype(np.float32))
