"""How the server runs: one typed object that refuses unsafe values at start, not at three in the morning."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from models.images import MAX_BYTES, MAX_PIXELS, ImageLimits
from service.http.auth import Key, parse_keys

MIB = 2**20


class ServiceSettings(BaseSettings):
    """Settings of the server, each from the environment variable OPENWORLD_<NAME>."""

    model_config = SettingsConfigDict(env_prefix="OPENWORLD_", env_ignore_empty=True, extra="ignore", frozen=True)

    data: Path = Field(Path("data"), description="the data folder: versions, images, backbone")
    host: str = Field("127.0.0.1", description="address to listen on; other than loopback only with keys")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    keys: Annotated[tuple[Key, ...], NoDecode] = Field(
        (), description="who may do what: name:role+role:secret, comma-separated; roles predict, label, operate"
    )
    rate_limit: float = Field(0, ge=0, description="images a second that one key may send, 0: no limit")

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where to compute; cuda refuses to start without"
    )
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, description="CPU threads of ONNX Runtime")
    decode_threads: int = Field(
        default_factory=lambda: max(1, (os.cpu_count() or 1) // 2), ge=1, description="threads that decode pictures"
    )
    lanes: int = Field(0, ge=0, description="batches computed side by side, 0: one a thread on a CPU, one on a GPU")
    max_batch: int = Field(0, ge=0, le=256, description="images computed at once, 0: 8 on a CPU, 32 on a GPU")
    queue_limit: int = Field(256, ge=1, description="images inside the server at once; near it new requests get 429")
    memory_limit: int = Field(512 * MIB, ge=MIB, description="bytes of request bodies held at once; more get 429")
    max_body: int = Field(64 * MIB, ge=1024, description="bytes of one request")
    max_images: int = Field(64, ge=1, description="images of one request")
    max_image_bytes: int = Field(MAX_BYTES, ge=1024, description="bytes of one image")
    max_pixels: int = Field(MAX_PIXELS, ge=1024, description="pixels of one image, checked before it is decoded")
    request_timeout: float = Field(10, gt=0, description="seconds a request may take unless it says otherwise")
    max_request_timeout: float = Field(60, gt=0, description="the longest that X-Request-Timeout may ask for")

    poll_seconds: float = Field(5, gt=0, description="how often to look for a new version when nobody announces it")
    pinned_versions: int = Field(2, ge=1, description="versions kept loaded for ?version= beside the current one")
    redis_url: SecretStr | None = Field(None, description="Redis for the queue and announcements of new versions")
    drain_seconds: float = Field(1, ge=0, description="how long to answer as not ready before listening ends")
    shutdown_seconds: float = Field(30, gt=0, description="how long accepted requests may take to finish at the end")

    lease_seconds: float = Field(30, gt=0, description="a trainer silent for so long has lost its task to the next one")
    task_max_classes: int = Field(200, ge=1, description="classes of one batch")
    task_max_images: int = Field(20_000, ge=1, description="images of one batch")
    task_max_bytes: int = Field(2048 * MIB, ge=MIB, description="bytes of one batch")

    inbox: bool = Field(True, description="keep novel images for labellers")
    inbox_count: int = Field(5000, ge=1, description="novel images kept")
    inbox_bytes: int = Field(1024 * MIB, ge=MIB, description="bytes of novel images kept")
    inbox_rate: float = Field(20, gt=0, description="new novel images a second that are kept")
    inbox_days: float = Field(30, gt=0, description="days that a novel image is kept")
    recent_bytes: int = Field(
        64 * MIB, ge=0, description="bytes of the last images answered, in memory, for people to correct; 0: none"
    )

    drift_window: int = Field(2000, ge=10, description="scores that drift is measured over, of the last hour")
    drift_minimum: int = Field(200, ge=10, description="scores without which nothing is said about drift")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what to log")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else JSON")

    @field_validator("keys", mode="before")
    @classmethod
    def _read_keys(cls, value: object) -> object:
        return parse_keys(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if not self.keys and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached by others and there are no keys: "
                "set OPENWORLD_KEYS=name:predict+label+operate:secret, or listen on 127.0.0.1"
            )
        if self.max_images > self.queue_limit:
            raise ValueError("max_images must not be larger than queue_limit: such a request could never be answered")
        if self.max_image_bytes > self.max_body:
            raise ValueError("max_image_bytes must not be larger than max_body: such an image could never be sent")
        if self.drift_minimum > self.drift_window:
            raise ValueError("drift_minimum must not be larger than drift_window: there would never be enough scores")
        return self

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(self.max_image_bytes, self.max_pixels)

    def shown(self) -> dict[str, object]:
        """Every setting for the log, secrets masked."""
        return {**self.model_dump(mode="json", exclude={"keys"}), "keys": [repr(key) for key in self.keys]}

    def changed(self) -> dict[str, object]:
        """Those that are not the defaults, for people."""
        shown = self.shown()
        return {name: shown[name] for name in sorted(self.model_fields_set)}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
