"""The answer to one image: a learned class, or `novel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from models.inference.evidence import Evidence, Floats
from models.inference.model import Model
from models.inference.novelty import summaries

NEAREST = 3
SURE_SHARE = 0.7  # the least share of a label that the model is sure of

Certainty = Literal["sure", "unsure", "novel"]


@dataclass(frozen=True)
class Answer:
    """What the model says about an image."""

    label: str | None  # None when novel
    novel: bool
    certainty: Certainty
    score: float | None  # the novelty score, higher for known images; None while nothing is learned
    calibrated_score: float  # the quantile of `score` among left-out known images
    p_novel: float  # falls in `score`
    task: int | None  # the task of the best class, also when novel
    nearest: list[tuple[str, float]]  # the most similar known classes and their shares, best first; see `answer`

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


NOTHING_KNOWN = Answer(None, True, "novel", None, 0.0, 1.0, None, [])


def answer(model: Model, evidence: Evidence) -> list[Answer]:
    """Algorithm 2 for n images: the argmax over all classes of all tasks; novel if p_novel is above `novel_above`.

    A class's share in `nearest` is its part of the rule's scores times the probability of a known class, 1 - p_novel,
    which counts as at most 1/2 for a novel answer and as at least 1/2 for a known one, wherever `novel_above` lies. All
    shares together are therefore at most 1, and at most 1/2 for a novel image.
    """
    n = len(evidence.frozen.distances)
    if not model.tasks:
        return [NOTHING_KNOWN] * n
    log_scores = model.rule.log_scores(evidence)  # (n, C)
    scores = model.novelty.scores(summaries(evidence, log_scores))
    calibrated, p_novel = model.novelty.calibrated(scores), model.novelty.p_novel(scores)
    weights = np.exp(log_scores - log_scores.max(axis=1, keepdims=True))
    parts = weights / weights.sum(axis=1, keepdims=True)
    order = np.argsort(-log_scores, axis=1, kind="stable")
    labels, tasks, novel_above = model.labels, model.task_of_class, model.novelty.novel_above
    answers = []
    for i in range(n):
        best = int(order[i, 0])
        novel = bool(p_novel[i] > novel_above) or labels[best] is None  # an image of a retired class is novel
        p_known = 1 - float(p_novel[i])
        p_known = min(p_known, 0.5) if novel else max(p_known, 0.5)
        label = None if novel else labels[best]
        nearest = _nearest(labels, p_known * parts[i], order[i].tolist())
        answers.append(
            Answer(
                label=label,
                novel=novel,
                certainty=certainty(label, nearest),
                score=float(scores[i]),
                calibrated_score=float(calibrated[i]),
                p_novel=float(p_novel[i]),
                task=int(tasks[best]),
                nearest=nearest,
            )
        )
    return answers


def certainty(label: str | None, nearest: Sequence[tuple[str, float]]) -> Certainty:
    """ "novel" without a label; "sure" if the label's share in `nearest` is at least SURE_SHARE; else "unsure"."""
    if label is None:
        return "novel"
    return "sure" if dict(nearest).get(label, 0.0) >= SURE_SHARE else "unsure"


def _nearest(labels: Sequence[str | None], shares: Floats, order: Sequence[int]) -> list[tuple[str, float]]:
    """The labels of the best classes; merged classes add up, retired classes are left out."""
    total: dict[str, float] = {}
    for c in order:
        label = labels[c]
        if label is not None and (label in total or len(total) < NEAREST):
            total[label] = total.get(label, 0.0) + float(shares[c])
    return sorted(total.items(), key=lambda entry: -entry[1])
