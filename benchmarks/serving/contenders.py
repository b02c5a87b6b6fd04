"""Who is measured, and with which settings: commands and environments, nothing that runs.

Each peer has a few settings; the best of them in a short trial is the one that is compared. `cores` is the number of
threads that every contender may compute with, whether in one process or spread over several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving import peers

SERVICE, BARE = "openworld", "bare loop"
COMMON = ("onnxruntime-gpu", "onnxruntime", "numpy", "pillow", "starlette", "fastapi", "uvicorn", "uvloop", "httptools")


@dataclass(frozen=True)
class Variant:
    """A contender with one choice of settings."""

    settings: Mapping[str, object]
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """A server that answers POST /predict."""

    name: str
    about: str
    python: str
    packages: Sequence[str]
    variants: Sequence[Variant]
    form: bool = False  # the image comes as a file of a form; otherwise it is the body


def service(cores: int) -> Contender:
    """As people run it: default settings, or what OPENWORLD_ variables say."""
    command = [sys.executable, "-m", "openworld", "serve"]
    packages = ("openworld", *COMMON)
    return Contender(SERVICE, "this service", sys.executable, packages, [Variant({"threads": cores}, command)])


def torch(cores: int) -> Contender:
    """What a team without a serving framework writes first."""
    command = [sys.executable, "-m", "benchmarks.serving.apps.torch_app"]
    variants = [
        Variant(
            {"handler": handler, "threads": cores},
            command,
            {"SERVING_HANDLER": handler, "SERVING_THREADS": str(cores)},
        )
        for handler in ("async def", "def")
    ]
    about = "FastAPI handler, torch model, one image at a time"
    return Contender("torch", about, sys.executable, ("torch", *COMMON), variants)


def litserve(cores: int) -> Contender:
    """Its documentation: workers_per_device = cores on a CPU, fast_queue above 100 requests a second, batching on."""
    python = str(peers.install("litserve"))
    command = [python, "-m", "benchmarks.serving.apps.litserve_app"]
    choices = [(1, cores, 16, 10.0), (cores, 1, 8, 10.0), (cores, 1, 2, 2.0)]
    about = "LitServe with our ONNX predictor, dynamic batching"
    return Contender("litserve", about, python, ("litserve", *COMMON), _variants(command, choices))


def bentoml(cores: int) -> Contender:
    """Its documentation: workers = cpu_count on a CPU, adaptive batching, a latency limit that is never reached.

    At its limit it sheds load with 503. Its examples have 1 s, at which it did so on a slow machine.
    """
    python = peers.install("bentoml")
    command = [str(python.with_name("bentoml")), "serve", "benchmarks.serving.apps.bento_app:Bento"]
    choices = [(1, cores, 16, 10_000.0), (cores, 1, 8, 10_000.0), (cores, 1, 2, 10_000.0)]
    about = "BentoML with our ONNX predictor, adaptive batching"
    return Contender("bentoml", about, str(python), ("bentoml", *COMMON), _variants(command, choices), form=True)


PEERS: dict[str, Callable[[int], Contender]] = {"torch": torch, "litserve": litserve, "bentoml": bentoml}


def _variants(command: Sequence[str], choices: Sequence[tuple[int, int, int, float]]) -> list[Variant]:
    out = []
    for workers, threads, batch, wait_ms in dict.fromkeys(choices):  # on one core some of them are the same
        settings = {"workers": workers, "threads": threads, "batch": batch, "wait_ms": wait_ms}
        environment = {f"SERVING_{name.upper()}": str(value) for name, value in settings.items()}
        # As everybody sets them who runs a process a core: otherwise each would have a BLAS thread for every core.
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
        out.append(Variant(settings, command, environment))
    return out


def environment(variant: Variant, data: Path, port: int, home: Path) -> dict[str, str]:
    """What a contender needs to know beside its settings; every contender reads its own part of it."""
    return {
        **variant.environment,
        "OPENWORLD_DATA": str(data),
        "OPENWORLD_PORT": str(port),
        "SERVING_DATA": str(data),
        "SERVING_PORT": str(port),
        "BENTOML_HOME": str(home),
        "BENTOML_HOST": "127.0.0.1",
        "BENTOML_PORT": str(port),
        "BENTOML_DO_NOT_TRACK": "True",
    }
