"""A helper of a trainer with the tiny backbone, as a process of its own. DIE_AFTER jobs it kills itself."""

from __future__ import annotations

import os
import signal
import sys

from tests.support.tiny_model import tiny_backbone
from trainer.helpers import helper
from trainer.learning.forward_passes import ForwardPasses
from trainer.learning.processes import Job, Tensors

COMMAND = (sys.executable, "-m", __name__)
_compute, _left = helper.compute, int(os.environ.get("DIE_AFTER", "-1"))


def dying(passes: ForwardPasses, job: Job) -> Tensors:
    global _left
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return _compute(passes, job)


if __name__ == "__main__":
    helper.compute = dying
    helper.run(lambda plan: ForwardPasses(tiny_backbone(int(plan["blocks"])), plan["seed"]))
