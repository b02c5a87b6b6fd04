"""What several processes of a trainer compute together; `trainer/helpers` starts and reaches the other processes.

**The result does not depend on the number of processes.** Work is cut into parts of a fixed size, each part is computed
whole by one process, and the parts are put together in their order.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
Tensors = dict[str, Tensor]


class Job(NamedTuple):
    """One part of the work, for a process that has only the backbone."""

    kind: str
    values: dict[str, Any]  # as JSON
    tensors: Tensors


class Processes(Protocol):
    """The processes of one training."""

    @property
    def count(self) -> int: ...

    def map(
        self,
        work: Iterable[T],
        compute: Callable[[T], R],
        job_of: Callable[[T], Job],
        result_of: Callable[[Tensors], R],
    ) -> Iterator[R]:
        """The results in the order of `work`.

        This process calls `compute`; another one gets `job_of` a part, and `result_of` reads its answer.
        """
        ...


class OneProcess:
    """This process alone."""

    count = 1

    def map(
        self,
        work: Iterable[T],
        compute: Callable[[T], R],
        job_of: Callable[[T], Job],
        result_of: Callable[[Tensors], R],
    ) -> Iterator[R]:
        return map(compute, work)
