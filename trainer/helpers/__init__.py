"""Several processes that learn one task together (`OPENWORLD_TRAIN_PROCESSES`, or `torchrun`).

The trainer has rank 0: it holds the lease, the optimiser and the checkpoint, and publishes. The other ranks are
helpers. They keep nothing but the backbone: a message to them holds all that its answer depends on.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.context import LearningContext
from trainer.learning.processes import OneProcess
from trainer.learning.settings import LearnerSettings

__all__ = ["shared_with_helpers", "start_helpers", "started_by_torchrun"]


def started_by_torchrun() -> bool:
    """Whether `torchrun`, or another program that sets its variables, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_helpers(data: Path, settings: LearnerSettings) -> None:
    """Start the helpers before the first task waits for them."""
    if _has_helpers(settings):
        from trainer.helpers.group import helpers_of

        helpers_of(data, settings.device, settings.threads, settings.processes)


@contextmanager
def shared_with_helpers(context: LearningContext) -> Iterator[None]:
    """Share the passes and gradients of a training with the helpers, if there are any."""
    settings = context.settings
    if not _has_helpers(settings):
        yield
        return
    from trainer.helpers.group import helpers_of

    plan = {"backbone": context.backbone.spec.sha256, "graphs": context.graphs, "seed": settings.seed}
    helpers = helpers_of(context.store.storage.root, settings.device, settings.threads, settings.processes)
    with helpers.training(plan, context.device) as processes:
        context.tokens.processes = processes
        try:
            yield
        finally:
            context.tokens.processes = OneProcess()  # the tokens serve the next training too


def _has_helpers(settings: LearnerSettings) -> bool:
    """Only then is torch.distributed imported."""
    return settings.processes > 1 or started_by_torchrun()
