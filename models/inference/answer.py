"""The answer to one image: a learned class, or `novel`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from models.inference.evidence import Evidence, Floats
from models.inference.model import ActiveLabels, Model
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
    if not model.classes:
        return [NOTHING_KNOWN] * n
    log_scores = model.rule.log_scores(evidence)  # (n, C)
    scores = model.novelty.scores(summaries(evidence, log_scores))
    calibrated, p_novel = model.novelty.calibrated(scores), model.novelty.p_novel(scores)
    weights = np.exp(log_scores - log_scores.max(axis=1, keepdims=True))
    nearest_labels = _nearest(model.active_labels, weights / weights.sum(axis=1, keepdims=True))
    labels, tasks, novel_above = model.labels, model.task_of_class, model.novelty.novel_above
    answers = []
    for i, best in enumerate(log_scores.argmax(axis=1).tolist()):
        novel = bool(p_novel[i] > novel_above) or labels[best] is None  # an image of a retired class is novel
        p_known = 1 - float(p_novel[i])
        p_known = min(p_known, 0.5) if novel else max(p_known, 0.5)
        label = None if novel else labels[best]
        nearest = [(name, p_known * part) for name, part in nearest_labels[i]]
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


def _nearest(labels: ActiveLabels, parts: Floats) -> list[list[tuple[str, float]]]:
    """Of each image: the labels of the best classes and their parts (n, C), where merged classes add up, best first."""
    if not labels.names:
        return [[] for _ in parts]
    own = parts[:, labels.classes]
    best, total = (ufunc.reduceat(own, labels.starts, axis=1) for ufunc in (np.maximum, np.add))
    chosen = np.argsort(-best, axis=1, kind="stable")[:, :NEAREST]
    sums = np.take_along_axis(total, chosen, axis=1)
    order = np.argsort(-sums, axis=1, kind="stable")
    columns, values = (np.take_along_axis(array, order, axis=1).tolist() for array in (chosen, sums))
    return [
        [(labels.names[c], part) for c, part in zip(*pair, strict=True)] for pair in zip(columns, values, strict=True)
    ]
