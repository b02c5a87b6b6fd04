"""Settings of the worker process; those of learning are in `trainer/learning/settings.py`."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tasks.settings import ProgramSettings


class WorkerSettings(ProgramSettings):
    """How the worker runs."""

    model_config = SettingsConfigDict(env_prefix="OPENWORLD_TRAIN_")

    lease_seconds: float = Field(
        30, gt=0, description="a worker that renews no lease for this long loses its task to another worker"
    )
    max_attempts: int = Field(
        3, ge=1, description="attempts at a task before it fails; one that advances does not count"
    )
    stall_seconds: float = Field(
        3600, gt=0, description="seconds without a finished epoch or another unit of work until the health check fails"
    )
    provisional: Literal["on", "off"] = Field(
        "on", description="answer with new classes in seconds, before their task is learned; off: once it is learned"
    )
    nice: int = Field(10, ge=0, le=19, description="niceness of the trainer's process; the server has priority")
    metrics_host: str = Field("127.0.0.1", description="address of the trainer's /metrics")
    metrics_port: int = Field(
        8001,
        ge=0,
        le=65535,
        description="port of the trainer's /metrics, 0: none; if 8001 is in use and no port is set, `openworld up` "
        "takes a free one",
    )
