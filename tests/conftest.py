from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def torch_as_it_was() -> Iterator[None]:
    """For what calls `set_up_torch`: it is meant for a whole process, which here goes on with other tests."""
    torch = pytest.importorskip("torch")
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_flush_denormal(False)
