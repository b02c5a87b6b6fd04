"""How torch computes here: the threads there are, the same result twice, and no denormal numbers."""

from __future__ import annotations

import torch

from trainer.learning.settings import LearnerSettings


def set_up_torch(settings: LearnerSettings) -> None:
    """Once a process, before the first tensor operation."""
    # HAT's masks and their gradients underflow by design; a CPU takes a hundred times longer over denormal numbers, and
    # flushing them to zero halves an epoch. Threads inherit it, so it comes before they are made.
    torch.set_flush_denormal(True)
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
