"""What would improve a version: confused classes, labels that look wrong, and classes that need more images.

All three follow from left-out frozen scores of the kept images. The networks have seen most of these images, so their
evidence does not count. An image's shares are the softmax of a rule's frozen terms over all classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Floats, FrozenScores, log_softmax
from models.inference.rules import FROZEN_TERMS, Rule
from trainer.learning.draws import are_drawn

MOST_PAIRS, MOST_LABELS, MOST_CLASSES = 5, 10, 3
CONFUSED_IMAGES, CONFUSED_SHARE = 2, 0.1  # of a confused pair, at least
OWN_SHARE, OTHER_SHARE = 0.05, 0.8  # a label looks wrong if its share is below, and that of another label above
FACTORS = 2.0 ** np.arange(-1, 5)

PRIOR_IMAGES = 2  # how many images of a class the error rate of all classes counts for
LEAST_MORE, MOST_MORE = 10, 50  # images to ask for
LEAST_GAIN = 0.05  # share of a class's images that further images are expected to correct
FEW_SCENES = 1 / 3  # per kept image


@dataclass(frozen=True)
class ConfusedPair:
    """Two classes whose images are answered as the other class."""

    classes: tuple[str, str]
    images: int  # answered as the other class
    share: float  # of the class's images, the mean of both classes


@dataclass(frozen=True)
class WrongLabel:
    """An image whose label looks wrong."""

    image: str  # key in the image store
    label: str
    looks_like: str
    share: float  # of `looks_like`


@dataclass(frozen=True)
class WeakClass:
    """A class that needs more images."""

    name: str
    images: int  # learned so far
    error: float  # estimated error rate
    more: int  # images to add
    scenes: int | None = None  # of its kept images, if they are few: the further images should be of others


@dataclass(frozen=True)
class Advice:
    """What would help; each list starts with the most important entry."""

    confused: tuple[ConfusedPair, ...] = ()
    wrong_labels: tuple[WrongLabel, ...] = ()
    weak: tuple[WeakClass, ...] = ()


@dataclass(frozen=True)
class Shares:
    """The shares of L labels for n left-out images."""

    labels: tuple[str, ...]
    keys: tuple[str, ...]
    own: NDArray[np.int64]  # (n,), the label of each image, as a column of the values
    values: Floats  # (n, L)

    @property
    def answers(self) -> NDArray[np.int64]:
        out: NDArray[np.int64] = self.values.argmax(axis=1)
        return out


def advise(
    left_out: FrozenScores,
    rule: Rule,
    keys: Sequence[str],
    columns: NDArray[np.int64],
    labels: Sequence[str | None],
    counts: NDArray[np.int64],
    weights: Floats,
) -> Advice:
    """The advice from left-out scores of n images for C classes; a row of NaN is an image that was not left out.

    `columns` are the classes of the images, `weights` what they say about fresh ones (`independent_weights`). `labels`
    are the labels that the classes are answered as, `counts` the images that were learned of them, kept or not.
    """
    shares = label_shares(left_out, rule, keys, columns, labels)
    images = dict.fromkeys(shares.labels, 0)
    for name, count in zip(labels, counts.tolist(), strict=True):
        if name is not None:
            images[name] += count
    suspicious = suspicious_rows(shares) & ~are_drawn(shares.keys)  # a draw has no label that could be wrong
    own = np.array(labels, object)[columns]  # (n,)
    weak = [
        replace(one, scenes=_few_scenes(weights[own == one.name])) for one in weak_classes(shares, suspicious, images)
    ]
    return Advice(confused_pairs(shares), wrong_labels(shares, suspicious), tuple(weak))


def _few_scenes(weights: Floats) -> int | None:
    """The scenes of a class's kept images, if they are few."""
    scenes = float(weights.sum())
    return round(scenes) if 0 < scenes <= FEW_SCENES * len(weights) else None


def frozen_rule(rule: Rule, left_out: FrozenScores, columns: NDArray[np.int64]) -> Rule:
    """The frozen terms of a rule, times the factor that suits left-out images best when these terms decide alone."""
    weights = {name: rule.weights.get(name, 0.0) for name in FROZEN_TERMS}
    rows = np.flatnonzero(left_out.complete)
    if len(rows) == 0:
        return Rule(rule.name, weights)
    scores = rule.frozen_scores(left_out)[rows]

    def loss(factor: float) -> float:
        return -float(log_softmax(factor * scores)[np.arange(len(rows)), columns[rows]].mean())

    factor = min(FACTORS.tolist(), key=loss)
    return Rule(rule.name, {name: factor * weight for name, weight in weights.items()})


def label_shares(
    left_out: FrozenScores,
    rule: Rule,
    keys: Sequence[str],
    columns: NDArray[np.int64],
    labels: Sequence[str | None],
) -> Shares:
    """The shares of all images that were left out: merged classes are one label, retired classes do not count."""
    scores = rule.frozen_scores(left_out)
    names = tuple(dict.fromkeys(name for name in labels if name is not None))
    active = np.flatnonzero([name is not None for name in labels])
    of_class = np.array([-1 if name is None else names.index(name) for name in labels], np.int64)
    rows = np.flatnonzero(np.isin(columns, active) & left_out.complete)
    values = np.zeros((len(rows), len(names)))
    if len(rows):
        shares = np.exp(log_softmax(scores[np.ix_(rows, active)]))
        np.add.at(values.T, of_class[active], shares.T)
    return Shares(names, tuple(keys[row] for row in rows.tolist()), of_class[columns[rows]], values)


def confused_pairs(shares: Shares) -> tuple[ConfusedPair, ...]:
    """The pairs of labels with the largest share of images that are answered as the other label."""
    size = len(shares.labels)
    answered = np.zeros((size, size))
    np.add.at(answered, (shares.own, shares.answers), 1)
    rates = answered / np.maximum(answered.sum(axis=1, keepdims=True), 1)
    images, both = np.triu(answered + answered.T, 1), (rates + rates.T) / 2
    pairs = [
        ConfusedPair((shares.labels[a], shares.labels[b]), int(images[a, b]), float(both[a, b]))
        for a, b in np.argwhere((images >= CONFUSED_IMAGES) & (both >= CONFUSED_SHARE)).tolist()
    ]
    return tuple(sorted(pairs, key=lambda pair: -pair.share)[:MOST_PAIRS])


def suspicious_rows(shares: Shares) -> NDArray[np.bool_]:
    """Whether each image's label looks wrong: (n,)."""
    own = shares.values[np.arange(len(shares.own)), shares.own]
    out: NDArray[np.bool_] = (own < OWN_SHARE) & (shares.values.max(axis=1, initial=0.0) > OTHER_SHARE)
    return out


def wrong_labels(shares: Shares, suspicious: NDArray[np.bool_]) -> tuple[WrongLabel, ...]:
    """The suspicious images, the smallest share of the own label first."""
    own = shares.values[np.arange(len(shares.own)), shares.own]
    answers = shares.answers
    rows = sorted(np.flatnonzero(suspicious).tolist(), key=lambda row: float(own[row]))[:MOST_LABELS]
    return tuple(
        WrongLabel(
            image=shares.keys[row],
            label=shares.labels[shares.own[row]],
            looks_like=shares.labels[answers[row]],
            share=float(shares.values[row, answers[row]]),
        )
        for row in rows
    )


def weak_classes(shares: Shares, suspicious: NDArray[np.bool_], images: Mapping[str, int]) -> tuple[WeakClass, ...]:
    """The classes whose error further images would reduce most.

    The error rate e of a class with m images is its share of wrong answers, drawn toward that of all classes and then,
    because m may be small, toward 1/2: (m e + 1) / (m + 2). Suspicious images do not count: more images do not correct
    a label. The class is asked to double its images, within bounds. The error is assumed to fall as 1 / m, so that k
    more images correct a share of e k / (m + k). A class is weak if this share is large, or if it has one image.
    """
    wrong = (shares.answers != shares.own) & ~suspicious
    overall = float(wrong.sum()) / max(int((~suspicious).sum()), 1)
    ranked = []
    for c, (name, count) in enumerate(images.items()):
        own = (shares.own == c) & ~suspicious
        rate = (float(wrong[own].sum()) + PRIOR_IMAGES * overall) / (int(own.sum()) + PRIOR_IMAGES)
        error = (count * rate + 1) / (count + 2)
        more = min(max(count, LEAST_MORE), MOST_MORE)
        gain = error * more / (count + more)
        if count == 1 or gain >= LEAST_GAIN:
            ranked.append((count > 1, -gain, WeakClass(name, count, error, more)))
    return tuple(weak for _, _, weak in sorted(ranked, key=lambda entry: entry[:2])[:MOST_CLASSES])
