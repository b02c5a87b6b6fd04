"""The measured servers and their settings: commands and environments.

Each peer has a few variants; a short trial selects the fastest. `cores` is the number of compute threads per contender,
in one process or spread over several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.serving import peers

SERVICE, BARE = "openworld", "bare loop"
MODELS = {"onnx": "our ONNX predictor", "torch": "the naive model in torch"}
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
    form: bool = False  # send the image as a form file instead of the body


def service(cores: int) -> Contender:
    """The service with default settings, or those of OPENWORLD_ variables."""
    command = [sys.executable, "-m", "openworld", "serve"]
    packages = ("openworld", *COMMON)
    return Contender(SERVICE, "this service", sys.executable, packages, [Variant({"threads": cores}, command)])


def torch(cores: int) -> Contender:
    """A FastAPI handler around the naive model."""
    command = [sys.executable, "-m", "benchmarks.serving.apps.torch_app"]
    variants = [
        Variant(
            {"handler": handler, "threads": cores},
            command,
            {"SERVING_HANDLER": handler, "SERVING_THREADS": str(cores)},
        )
        for handler in ("async def", "def")
    ]
    about = "FastAPI handler, naive model in torch, one image at a time"
    return Contender("torch", about, sys.executable, ("torch", *COMMON), variants)


def litserve(cores: int, model: str = "onnx") -> Contender:
    """Its documentation: workers_per_device = cores on a CPU, fast_queue above 100 requests per second, batching on."""
    name = _name("litserve", model)
    python = str(peers.install(name))
    command = [python, "-m", "benchmarks.serving.apps.litserve_app"]
    choices = [(1, cores, 16, 10.0), (cores, 1, 8, 10.0), (cores, 1, 2, 2.0)]
    about = f"LitServe with {MODELS[model]}, dynamic batching"
    return Contender(name, about, python, ("litserve", *COMMON), _variants(command, choices, model))


def bentoml(cores: int, model: str = "onnx") -> Contender:
    """Its documentation: workers = cpu_count on a CPU, adaptive batching, a latency limit that is never reached.

    At its limit it sheds load with 503. Its examples have 1 s, at which it did so on a slow machine.
    """
    name = _name("bentoml", model)
    python = peers.install(name)
    command = [str(python.with_name("bentoml")), "serve", "benchmarks.serving.apps.bento_app:Bento"]
    choices = [(1, cores, 16, 10_000.0), (cores, 1, 8, 10_000.0), (cores, 1, 2, 10_000.0)]
    about = f"BentoML with {MODELS[model]}, adaptive batching"
    return Contender(name, about, str(python), ("bentoml", *COMMON), _variants(command, choices, model), form=True)


PEERS: dict[str, Callable[[int], Contender]] = {
    "torch": torch,
    "litserve": litserve,
    "bentoml": bentoml,
    "litserve-torch": partial(litserve, model="torch"),
    "bentoml-torch": partial(bentoml, model="torch"),
}
SETS = {"all": ["torch", "litserve", "bentoml"], "naive": ["torch", "litserve-torch", "bentoml-torch"], "none": []}


def _name(peer: str, model: str) -> str:
    return peer if model == "onnx" else f"{peer}-{model}"


def _variants(command: Sequence[str], choices: Sequence[tuple[int, int, int, float]], model: str) -> list[Variant]:
    out = []
    for workers, threads, batch, wait_ms in dict.fromkeys(choices):  # some choices coincide on one core
        settings = {"workers": workers, "threads": threads, "batch": batch, "wait_ms": wait_ms}
        environment = {f"SERVING_{name.upper()}": str(value) for name, value in (settings | {"model": model}).items()}
        # The usual setting with one process per core: otherwise every process starts a BLAS thread per core.
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
        out.append(Variant(settings, command, environment))
    return out


def environment(variant: Variant, data: Path, port: int, home: Path) -> dict[str, str]:
    """Variables for all contenders; each reads its own."""
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
