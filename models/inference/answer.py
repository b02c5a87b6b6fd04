"""The answer to one image: a learned class, or `novel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.inference.calibration import p_novel
from models.inference.evidence import Evidence
from models.inference.model import Model

NEAREST = 3


@dataclass(frozen=True)
class Answer:
    """What the service says of an image."""

    label: str | None  # None when novel
    novel: bool
    score: float | None  # log of the rule's best class score; None while nothing is learned
    calibrated_score: float  # its quantile among held-out known images
    p_novel: float
    task: int | None  # of the best class, novel or not
    nearest: list[tuple[str, float]]  # known classes that it looks like, with their shares of the rule's score

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


NOTHING_KNOWN = Answer(None, True, None, 0.0, 1.0, None, [])


def answer(model: Model, evidence: Evidence) -> list[Answer]:
    """Algorithm 2 for n images: argmax over all classes of all tasks, and its maximum against the threshold."""
    n = len(evidence.frozen)
    if not model.tasks:
        return [NOTHING_KNOWN] * n
    log_scores = model.rule.log_scores(evidence)  # (n, C)
    scores = log_scores.max(axis=1)
    calibrated = model.calibration.calibrated(scores)
    novelty = p_novel(model.calibration.p_known(evidence))
    shares = _shares(log_scores)
    order = np.argsort(-log_scores, axis=1, kind="stable")
    labels, tasks, threshold = model.labels, model.task_of_class, float(model.calibration.threshold[0])
    answers = []
    for i in range(n):
        best = int(order[i, 0])
        # Written so that a score that is not a number is novel, too. What people retired is not known any more.
        novel = not scores[i] >= threshold or labels[best] is None
        answers.append(
            Answer(
                label=None if novel else labels[best],
                novel=novel,
                score=float(scores[i]),
                calibrated_score=float(calibrated[i]),
                p_novel=float(novelty[i]),
                task=int(tasks[best]),
                nearest=_nearest(labels, shares[i], order[i]),
            )
        )
    return answers


def _nearest(
    labels: Sequence[str | None], shares: NDArray[np.float64], order: NDArray[np.int64]
) -> list[tuple[str, float]]:
    """The best labels; classes that were merged are one, and retired ones are none."""
    total: dict[str, float] = {}
    for c in order:
        label = labels[c]
        if label is not None and (label in total or len(total) < NEAREST):
            total[label] = total.get(label, 0.0) + float(shares[c])
    return sorted(total.items(), key=lambda entry: -entry[1])


def _shares(log_scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each class's share of the scores' sum."""
    weights = np.exp(log_scores - log_scores.max(axis=1, keepdims=True))
    out: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return out
