"""Classifiers in closed form on the frozen backbone, without training of the network.

Each gets the training images of all classes learned so far. All but `joint` could be updated task by task with the same
result; `joint` is an upper bound, which a method that learns continually cannot reach by this means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.accuracy.data import plain_features
from benchmarks.accuracy.metrics import Floats, Step
from benchmarks.accuracy.streams import Stream
from models.inference.gaussians import Gaussians
from trainer.learning.tokens import TokenCache

Labels = NDArray[np.int64]
RANDOM_FEATURES = 2000
RIDGE_PENALTIES = 10.0 ** np.arange(-4, 3)  # relative to the mean diagonal of the Gram matrix
JOINT_PENALTIES = (0.01, 0.1, 1.0, 10.0)
NEIGHBOURS = 5
ABOUT = {
    "slda": "Mahalanobis distance to class means of the backbone's plain feature, one shrunk covariance",
    "ncm": "cosine to class means of the plain feature",
    "ranpac": f"ridge regression on {RANDOM_FEATURES} random ReLU features of the plain feature",
    "knn": f"{NEIGHBOURS} nearest training images by cosine of the plain feature",
    "joint": "upper bound: logistic regression on the frozen feature of all classes at once",
}


class Scores(NamedTuple):
    classes: Floats  # (n, C)
    novelty: Floats  # (n,), higher for known images


def slda(train: Floats, labels: Labels, classes: int, test: Floats) -> Scores:
    distances, _ = Gaussians.fit(train, labels, classes).scores(test)
    return Scores(-0.5 * distances**2, -distances.min(axis=1))


def ncm(train: Floats, labels: Labels, classes: int, test: Floats) -> Scores:
    means = np.stack([train[labels == c].mean(axis=0) for c in range(classes)])
    cosines = _unit(test) @ _unit(means).T
    return Scores(cosines, cosines.max(axis=1))


def ranpac(train: Floats, labels: Labels, classes: int, test: Floats) -> Scores:
    projection = np.random.default_rng(0).standard_normal((train.shape[1], RANDOM_FEATURES))
    h, h_test = (np.maximum(_unit(x) @ projection, 0.0) for x in (train, test))
    target = np.eye(classes)[labels]
    scores = h_test @ ridge(h, target)
    return Scores(scores, scores.max(axis=1))


def ridge(h: Floats, target: Floats) -> Floats:
    """Coefficients (M, C), the penalty with the least squared error of the images left out one at a time."""
    values, vectors = np.linalg.eigh(h @ h.T)  # the (n, n) Gram matrix has the same non-zero eigenvalues
    values, projected = np.maximum(values, 0.0), vectors.T @ target
    scale = values.sum() / h.shape[1]
    best: tuple[float, Floats] | None = None
    for penalty in RIDGE_PENALTIES * scale:
        share = values / (values + penalty)
        hat = ((vectors**2) * share).sum(axis=1)
        residual = (target - vectors @ (share[:, None] * projected)) / np.maximum(1 - hat, 1e-9)[:, None]
        error = float((residual**2).mean())
        if best is None or error < best[0]:
            best = error, vectors @ (projected / (values + penalty)[:, None])
    if best is None:
        raise ValueError("no penalty to choose from")
    coefficients: Floats = h.T @ best[1]
    return coefficients


def knn(train: Floats, labels: Labels, classes: int, test: Floats) -> Scores:
    """Votes of the nearest images, ties by cosine; novelty is the cosine of the last of them."""
    cosines = _unit(test) @ _unit(train).T
    nearest = np.argsort(-cosines, axis=1)[:, :NEIGHBOURS]
    near = np.take_along_axis(cosines, nearest, axis=1)
    scores = np.zeros((len(test), classes))
    for place in range(nearest.shape[1]):
        # A vote counts 1, its cosine only decides between equal counts.
        scores[np.arange(len(test)), labels[nearest[:, place]]] += 1 + 0.1 * near[:, place]
    return Scores(scores, near[:, -1])


def logistic(train: Floats, labels: Labels, classes: int, test: Floats, penalty: float) -> Floats:
    """Logits (n, C) of multinomial logistic regression; `penalty` is per image, for features of variance 1."""
    centre, scale = train.mean(axis=0), max(float(train.std(axis=0).mean()), 1e-12)
    x, x_test = (torch.from_numpy((rows - centre) / scale).float() for rows in (train, test))
    target = torch.from_numpy(labels)
    weight = torch.zeros(x.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(x @ weight + bias, target) + penalty / 2 * (weight**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return (x_test @ weight + bias).double().numpy()


def joint_penalty(train: Floats, labels: Labels, classes: int) -> float:
    """The penalty with the best accuracy on three folds of the training images."""
    folds = np.random.default_rng(0).permutation(len(labels)) % 3

    def accuracy(penalty: float) -> float:
        right = []
        for fold in range(3):
            inside = folds == fold
            logits = logistic(train[~inside], labels[~inside], classes, train[inside], penalty)
            right.append((logits.argmax(axis=1) == labels[inside]).mean())
        return float(np.mean(right))

    return max(JOINT_PENALTIES, key=accuracy)


def run(tokens: TokenCache, stream: Stream) -> dict[str, list[Step]]:
    """The scores of every baseline after each task."""
    keys = [key for task in stream.tasks for own in task.values() for key in own]
    sizes = [len(own) for task in stream.tasks for own in task.values()]
    labels = np.repeat(np.arange(len(sizes)), sizes)
    plain, plain_test = plain_features(tokens, keys), plain_features(tokens, stream.test_keys)
    frozen, frozen_test = (tokens.frozen(own)[0].astype(np.float64) for own in (keys, stream.test_keys))
    penalty = joint_penalty(frozen, labels, len(sizes))

    def joint(train: Floats, own: Labels, classes: int, test: Floats) -> Scores:
        logits = logistic(train, own, classes, test, penalty)
        return Scores(logits, logits.max(axis=1))

    methods: dict[str, tuple[Callable[[Floats, Labels, int, Floats], Scores], Floats, Floats]] = {
        "slda": (slda, plain, plain_test),
        "ncm": (ncm, plain, plain_test),
        "ranpac": (ranpac, plain, plain_test),
        "knn": (knn, plain, plain_test),
        "joint": (joint, frozen, frozen_test),
    }
    steps: dict[str, list[Step]] = {name: [] for name in methods}
    for count, task_of_class in _learned(stream.tasks):
        for name, (method, train, test) in methods.items():
            started = time.monotonic()
            inside = labels < count
            scores = method(train[inside], labels[inside], count, test)
            steps[name].append(Step(scores.classes, task_of_class, scores.novelty, seconds=time.monotonic() - started))
    return steps


def _learned(tasks: Sequence[dict[str, list[str]]]) -> list[tuple[int, Labels]]:
    """After each task: the number of classes, and the task of each."""
    sizes = [len(task) for task in tasks]
    return [(sum(sizes[: k + 1]), np.repeat(np.arange(k + 1), sizes[: k + 1])) for k in range(len(sizes))]


def _unit(x: Floats) -> Floats:
    out: Floats = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return out
