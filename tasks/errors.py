"""Errors of batches and of the task queue.

OpenWorldError
├── BatchError                a labelled batch has problems; the message lists all of them
└── QueueError                the task queue
    ├── QueueUnavailable        Redis cannot be reached or refuses commands
    │   └── TaskNotReplicated     no replica of Redis has confirmed the task: submit it again
    ├── QueueUnsuitable         Redis is too old, or may delete tasks: it must be configured first
    ├── QueueFull               too many tasks are waiting
    ├── IdempotencyConflict     the idempotency key belongs to another batch
    ├── LeaseLost               another worker holds the task: stop working on it
    ├── UnknownTask             no task has this id
    └── WrongState              the operation is not allowed in the task's state
"""

from models.errors import OpenWorldError


class BatchError(OpenWorldError):
    """A labelled batch cannot be learned. `problems` lists every problem found."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class QueueError(OpenWorldError):
    """Base class of task queue errors."""


class QueueUnavailable(QueueError):
    """Redis cannot be reached or refuses commands. Accepted tasks are safe."""


class TaskNotReplicated(QueueUnavailable):
    """Too few replicas of Redis have confirmed the task. Submitting it again gives the same task, once."""


class QueueUnsuitable(QueueError):
    """The Redis server is too old, or is configured so that it may delete tasks."""


class QueueFull(QueueError):
    """Too many tasks are waiting."""


class IdempotencyConflict(QueueError):
    """The idempotency key was used for another batch."""


class LeaseLost(QueueError):
    """Another worker holds the task. Discard the work done on it."""


class UnknownTask(QueueError):
    """No task has this id, or its record has expired."""


class WrongState(QueueError):
    """The operation is not allowed in the task's current state."""
