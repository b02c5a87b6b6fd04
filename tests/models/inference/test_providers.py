"""The choice of ONNX Runtime's execution provider, and graphs that cannot be loaded."""

import pytest

from models.errors import BackboneError
from models.inference import providers
from models.inference.providers import CPU, CUDA, Device, check_providers, choose_providers, gpu_present
from models.inference.runtime import ROLES, Runtime
from tests.support.exported import Exported

without_gpu = pytest.mark.skipif(gpu_present(), reason="this machine has a GPU")


@pytest.mark.parametrize(
    ("device", "available", "gpu", "requested"),
    [
        ("cpu", [CUDA, CPU], True, [CPU]),
        ("auto", [CUDA, CPU], True, [CUDA, CPU]),
        ("auto", [CUDA, CPU], False, [CPU]),
        ("auto", [CPU], True, [CPU]),
        ("cuda", [CUDA, CPU], True, [CUDA, CPU]),
    ],
)
def test_cuda_is_requested_only_where_it_is_available(
    device: Device, available: list[str], gpu: bool, requested: list[str]
) -> None:
    assert choose_providers(device, available, gpu) == requested


@pytest.mark.parametrize(
    ("available", "gpu", "reason"), [([CUDA, CPU], False, "no NVIDIA GPU"), ([CPU], True, "without CUDA")]
)
def test_requiring_cuda_where_it_is_not_available_is_an_error(available: list[str], gpu: bool, reason: str) -> None:
    with pytest.raises(BackboneError, match=f"{reason}.*`auto` or `cpu`"):
        choose_providers("cuda", available, gpu)


def test_requiring_cuda_fails_when_the_session_runs_without_it() -> None:
    check_providers("cuda", [CUDA, CPU], [CUDA, CPU])
    with pytest.raises(BackboneError, match="could not start CUDA"):
        check_providers("cuda", [CUDA, CPU], [CPU])


def test_auto_falls_back_to_the_cpu_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_providers("auto", [CUDA, CPU], [CPU])
    assert "using the CPU" in caplog.text


@without_gpu
def test_a_runtime_that_requires_cuda_fails_without_a_gpu(small: Exported) -> None:
    with pytest.raises(BackboneError, match="cuda"):
        Runtime(small.graphs, "cuda", threads=1)


@without_gpu
def test_a_runtime_that_requires_cuda_fails_when_cuda_fails(small: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "gpu_present", lambda: True)
    with pytest.raises(BackboneError, match="cuda"):
        Runtime(small.graphs, "cuda", threads=1)


@without_gpu
def test_auto_without_a_gpu_prints_nothing(small: Exported, capfd: pytest.CaptureFixture[str]) -> None:
    runtime = Runtime(small.graphs, "auto", threads=1)
    assert runtime.device == "cpu"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("role", ROLES)
def test_a_broken_graph_is_refused_with_a_remedy(role: str, small: Exported) -> None:
    with pytest.raises(BackboneError, match="restore the file"):
        Runtime(small.graphs | {role: small.graphs[role][:1000]}, "cpu", threads=1)
