import os
import sys
from collections.abc import Iterator

import pytest

from deploy.fleet.object_store import environment_of
from tests.support.object_stores import seaweedfs_of_this_run
from tests.support.once_per_run import add_run_folder
from tests.support.ports import use_own_ports

# Settings that learn a task in seconds, on one thread.
ENVIRONMENT = {
    "OPENWORLD_BACKBONE": "tf_efficientnet_lite0",
    "OPENWORLD_TRAIN_EPOCHS": "3",
    "OPENWORLD_DEVICE": "cpu",
    "OPENWORLD_TRAIN_THREADS": "1",
}


def pytest_configure(config: pytest.Config) -> None:
    add_run_folder(config)
    use_own_ports()


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[int]:
    """The port of a real object store, whose variables are in the environment."""
    port = seaweedfs_of_this_run()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment_of(port).items():
            patch.setenv(name, value)
        yield port


@pytest.fixture(scope="module", autouse=True)
def restore_denormal_numbers() -> Iterator[None]:
    """A trainer in this process flushes them to zero; Hypothesis, in the next module, needs them."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(scope="module")
def restore_torch_settings() -> Iterator[None]:
    """Restore what `configure_torch` changes for the whole process."""
    torch = pytest.importorskip("torch")
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def environment(restore_torch_settings: None) -> Iterator[pytest.MonkeyPatch]:
    """Set ENVIRONMENT and remove every other OPENWORLD_ variable."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("OPENWORLD_")]:
            patch.delenv(name)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield patch
