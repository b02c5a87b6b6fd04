"""Which images of a batch train networks, which are held out, and what a version keeps with them.

Decided before the training, by the images alone: a provisional version and the one that learns the task calibrate on
the same images, so what follows from the images in closed form is computed once.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.learning.likeness import likeness_groups
from trainer.learning.memory import Samples, limit_held_out, merged, remember, split
from trainer.learning.reproducibility import random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


class DividedBatch(NamedTuple):
    trained: dict[str, list[str]]  # by class, those that are not held out
    kept: Samples  # what the version keeps of all classes


def divide(
    tokens: TokenCache, samples: Samples, images: Mapping[str, Sequence[str]], settings: LearnerSettings
) -> DividedBatch:
    """Divide images, by class, that the samples do not have under their label."""
    rng = random_stream(settings.seed, "division", *sorted(images))
    most = max(1, settings.keep_per_class // 2)  # held out of each class: the larger part is for replay
    keys = [key for own in images.values() for key in own]
    labels = np.repeat(np.arange(len(images)), [len(own) for own in images.values()])
    groups = likeness_groups(tokens.frozen(keys)[0], labels)
    group_of = dict(zip(keys, groups.tolist(), strict=True))
    trained, held_out = split(images, group_of, settings.recipe.hold_out, most, rng)
    kept_out = limit_held_out([*samples.held_out, *held_out], most, rng)
    memory = remember(samples.memory, trained, kept_out, settings.keep_per_class, settings.replay_size, rng)
    return DividedBatch(trained, Samples(memory, kept_out, merged(samples.seen, images)))
