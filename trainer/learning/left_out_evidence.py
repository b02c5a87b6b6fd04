"""The frozen evidence that a version is calibrated on: scores of kept images that are left out, and simulated novelty.

It follows from the images and their frozen statistics alone. A provisional version and the one that learns its task
have the same, so the second one takes over what the first one has computed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from models.inference.evidence import Floats, FrozenScores
from models.inference.model import Model
from trainer.learning.draws import are_drawn
from trainer.learning.leave_out import LeaveOut
from trainer.learning.memory import Samples
from trainer.learning.reproducibility import blas_threads, random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.simulation import left_out_scores, simulated_novelty
from trainer.learning.tokens import TokenCache

THREADS = 2  # people wait for a provisional version. The same number everywhere: the last bits of sums depend on it
_last: LRUCache[int, LeftOutEvidence] = LRUCache(1)  # by seed


@dataclass(frozen=True)
class LeftOutEvidence:
    """Of n kept images."""

    labels: dict[str, str]  # image key -> class
    kept: LeaveOut
    scores: FrozenScores  # (n, C), without the image; a row of NaN is an image that cannot be left out
    simulations: list[tuple[Floats, Floats]]  # see `simulated_novelty`

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """Which of them are draws: (n,)."""
        return are_drawn(list(self.labels))


def left_out_evidence(
    tokens: TokenCache, model: Model, samples: Samples, settings: LearnerSettings, *, again: bool = False
) -> LeftOutEvidence:
    """The same for the same images and statistics, also if it is computed again after a restart.

    `again`: it will be asked for again, so it stays in memory until then.
    """
    rng = random_stream(settings.seed, "calibration", len(model.classes))
    labels = choose_images(samples, settings.recipe.calibration_images, rng)
    column = {name: c for c, name in enumerate(model.classes)}
    columns = np.array([column[name] for name in labels.values()], np.int64)
    kept = LeaveOut(model.frozen, *tokens.frozen(list(labels)), columns)
    last = _last.pop(settings.seed, None)
    if last is None or last.labels != labels or not _same(last.kept, kept):
        with blas_threads(THREADS):
            last = LeftOutEvidence(labels, kept, left_out_scores(kept, rng), simulated_novelty(kept, rng))
    if again:
        _last[settings.seed] = last
    return last


def _same(one: LeaveOut, other: LeaveOut) -> bool:
    """Bit by bit."""
    arrays = [(getattr(one, name), getattr(other, name)) for name in ("columns", "features", "expanded")]
    for field in fields(one.statistics):
        arrays.append((getattr(one.statistics, field.name), getattr(other.statistics, field.name)))
    return all(np.array_equal(a, b) for a, b in arrays)


def choose_images(samples: Samples, most: int, rng: np.random.Generator) -> dict[str, str]:
    """Kept images, key -> class: at most `most`, the same number of each class, held-out ones first.

    Two of each class at least: one alone cannot be left out.
    """
    by_class: dict[str, list[str]] = {name: [] for name in samples.memory}
    for sample in samples.held_out:
        by_class.setdefault(sample.label, []).append(sample.key)
    for name, keys in samples.memory.items():
        by_class[name] += [keys[i] for i in rng.permutation(len(keys)) if keys[i] not in by_class[name]]
    quota = max(2, most // max(len(by_class), 1))
    return {key: name for name, keys in by_class.items() for key in keys[:quota]}
