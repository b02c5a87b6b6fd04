"""How the worker runs; how it learns is in `trainer/settings.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class WorkerSettings(BaseSettings):
    """Settings of the worker, each from the environment variable OPENWORLD_<NAME>."""

    model_config = SettingsConfigDict(env_prefix="OPENWORLD_", env_ignore_empty=True, extra="ignore", frozen=True)

    data: Path = Field(Path("data"), description="the data folder: versions, images, backbone")
    redis_url: SecretStr | None = Field(None, description="Redis with the queue of tasks")
    lease_seconds: float = Field(30, gt=0, description="a worker silent for so long has lost its task to the next one")
    max_attempts: int = Field(3, ge=1, description="attempts at a task before it has failed")
    trainer_nice: int = Field(10, ge=0, le=19, description="how far the trainer stands back for the server")
    trainer_host: str = Field("127.0.0.1", description="address of the worker's /metrics")
    trainer_port: int = Field(8001, ge=0, le=65535, description="port of the worker's /metrics, 0: none")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what to log")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else JSON")
