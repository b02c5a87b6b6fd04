"""Settings of the server: one typed object that refuses unsafe values at the start."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, IPvAnyNetwork, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from models.images import DECODED_PIXEL_BYTES, MAX_BYTES, MAX_PIXELS
from models.versions.keep import SETTING as KEEP_SETTING
from models.versions.keep import Keep
from service.key_store import KeyStore
from service.keys import Key, parse_keys
from tasks.settings import KEEP, Device, ProgramSettings, shared

MIB = 2**20


def _split(value: object) -> object:
    """Entries of a comma-separated text."""
    return tuple(filter(None, (part.strip() for part in value.split(",")))) if isinstance(value, str) else value


def _host(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\]", name):
        raise ValueError("a host name has no scheme, port or wildcard: robot.example")
    return name.lower()


def _origin(origin: str) -> str:
    if not re.fullmatch(r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", origin):
        raise ValueError(
            "an origin is a scheme and a host, with its port if it is not the default: https://robot.example"
        )
    return origin.lower()


Hosts = Annotated[tuple[Annotated[str, AfterValidator(_host)], ...], NoDecode, BeforeValidator(_split)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], NoDecode, BeforeValidator(_split)]
Shared = Annotated[tuple[Literal["recent", "inbox", "rates", "keys"], ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[tuple[IPvAnyNetwork, ...], NoDecode, BeforeValidator(_split)]


class ServiceSettings(ProgramSettings):
    """How the server runs."""

    model_config = SettingsConfigDict(env_prefix="OPENWORLD_SERVE_")

    host: str = shared("OPENWORLD_HOST", "127.0.0.1", "address to listen on; other than loopback only with keys")
    port: int = shared("OPENWORLD_PORT", 8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    keys: Annotated[tuple[Key, ...], NoDecode] = shared(
        "OPENWORLD_KEYS", (), "API keys: name:role+role:secret, comma-separated; roles predict, label, operate, monitor"
    )
    trusted_hosts: Hosts = Field(
        (), description="names of this server besides loopback, comma-separated; requests for others get 421"
    )
    trusted_origins: Origins = Field(
        (), description="origins of pages that may use it besides its own, comma-separated: https://robot.example"
    )
    trusted_proxies: Networks = Field(
        (), description="addresses or networks of reverse proxies whose X-Forwarded-* headers are read"
    )
    rate_limit: float = Field(0, ge=0, description="images per second and key, 0: no limit")

    keep: Keep | None = shared(KEEP_SETTING, None, KEEP)
    device: Device = shared("OPENWORLD_DEVICE", "auto", "where to compute; cuda refuses to start without a GPU")
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, description="CPU threads of ONNX Runtime")
    decode_threads: int = Field(
        default_factory=lambda: max(1, (os.cpu_count() or 1) // 2), ge=1, description="threads that decode images"
    )
    parallel_batches: int = Field(
        0, ge=0, description="batches computed in parallel, 0: one per thread on a CPU, one on a GPU"
    )
    batch_size: int = Field(0, ge=0, le=256, description="images computed together, 0: 4 on a CPU, 32 on a GPU")
    images_in_flight: int = Field(256, ge=1, description="images in the server at once; near it new requests get 429")
    body_memory: int = Field(512 * MIB, ge=MIB, description="bytes of request bodies in memory at once; more get 429")
    max_connections: int = Field(
        4000, ge=8, description="open connections; a new one replaces the one that waits longest for its client"
    )
    header_timeout: float = Field(10, gt=0, description="seconds for a client to send the headers of a request")
    key_requests: int = Field(256, ge=1, description="requests of one key in progress; more get 429")
    key_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of each limit on work in progress that one key may use; no limit without keys",
    )
    max_body_bytes: int = Field(64 * MIB, ge=1024, description="bytes per request")
    max_request_images: int = Field(64, ge=1, description="images per request")
    max_image_bytes: int = Field(MAX_BYTES, ge=1024, description="bytes per image")
    max_image_pixels: int = Field(MAX_PIXELS, ge=1024, description="pixels per image, checked before it is decoded")
    decode_memory: int = Field(
        1024 * MIB, ge=MIB, description="bytes of decoded images in memory at once, over all threads; more wait"
    )
    request_timeout: float = Field(10, gt=0, description="seconds per request, unless X-Request-Timeout says otherwise")
    max_request_timeout: float = Field(
        60, gt=0, description="longest deadline in seconds; a larger X-Request-Timeout is reduced to it"
    )

    poll_seconds: float = Field(5, gt=0, description="interval between checks for a new version without a notice")
    drain_seconds: float = Field(1, ge=0, description="seconds to answer as not ready before listening ends")
    shutdown_seconds: float = Field(30, gt=0, description="seconds for accepted requests to finish at shutdown")

    task_max_classes: int = Field(200, ge=1, description="classes per submitted batch")
    task_max_images: int = Field(20_000, ge=1, description="images per submitted batch")
    event_streams: int = Field(32, ge=1, description="tasks that a key follows at once as server-sent events")
    task_max_bytes: int = Field(2048 * MIB, ge=MIB, description="bytes per submitted batch")
    uploads: int = Field(16, ge=1, description="batches received, waiting or checked at once; more get 429")
    upload_bytes: int = Field(8192 * MIB, ge=MIB, description="bytes of such batches on disk at once; more get 429")
    upload_seconds: float = Field(3600, gt=0, description="seconds to send a batch, then 408")
    min_body_rate: float = Field(
        8192, gt=0, description="bytes per second that a body must arrive at, after OPENWORLD_SERVE_BODY_GRACE, or 408"
    )
    body_grace: float = Field(10, gt=0, description="seconds for which a body may arrive more slowly")

    inbox: bool = Field(True, description="keep novel images for labelling")
    inbox_count: int = Field(5000, ge=1, le=100_000, description="novel images kept, at most 100000")
    inbox_bytes: int = Field(1024 * MIB, ge=MIB, description="bytes of novel images kept")
    inbox_rate: float = Field(20, gt=0, description="new novel images kept per second")
    inbox_days: float | None = Field(
        None,
        gt=0,
        description="days that a novel image is kept, counted while a server runs; default: 30. In a folder that does "
        "not keep images, days since it was first seen; default: 1",
    )
    recent_bytes: int = Field(
        64 * MIB, ge=0, description="bytes of recently answered images kept in memory for correction; 0: none"
    )
    recent_seconds: float = Field(
        900, gt=0, description="seconds that recently answered images are kept in Redis, if servers share them"
    )
    shared: Shared = Field(
        (),
        description="what the servers of a data folder share through Redis, comma-separated: recent, inbox, rates, "
        "keys; see [operations.md](operations.md#several-servers)",
    )
    advertise: Annotated[str, AfterValidator(_origin)] | None = Field(
        None,
        description="address at which other servers reach this one, if they share the inbox: http://10.0.0.5:8000; "
        "default: found out",
    )
    drift_window: int = Field(
        2000, ge=100, description="scores of the last hour that drift is measured over; a tenth of them are needed"
    )

    @field_validator("keys", mode="before")
    @classmethod
    def _read_keys(cls, value: object) -> object:
        return parse_keys(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _safe(self) -> Self:
        open_without_keys = not self.keys and "keys" not in self.shared and not KeyStore(self.data).records()
        if open_without_keys and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached by others and there are no keys: add one with "
                "`openworld keys create`, set OPENWORLD_KEYS=name:predict+label+operate:secret, or listen on 127.0.0.1"
            )
        if self.shared and self.redis_url is None:
            raise ValueError("OPENWORLD_SERVE_SHARED needs Redis: set OPENWORLD_REDIS_URL, or unset it")
        if "inbox" in self.shared and "recent" not in self.shared:
            raise ValueError(
                "OPENWORLD_SERVE_SHARED has inbox without recent, so a prediction of another server could not be put "
                "into the inbox: use recent,inbox"
            )
        if self.max_request_images > self.images_in_flight:
            raise ValueError(
                "OPENWORLD_SERVE_MAX_REQUEST_IMAGES is larger than OPENWORLD_SERVE_IMAGES_IN_FLIGHT: "
                "a request of that size could never be answered"
            )
        if self.max_image_bytes > self.max_body_bytes:
            raise ValueError(
                "OPENWORLD_SERVE_MAX_IMAGE_BYTES is larger than OPENWORLD_SERVE_MAX_BODY_BYTES: "
                "an image of that size could never be sent"
            )
        if self.max_image_pixels * DECODED_PIXEL_BYTES > self.decode_memory:
            raise ValueError(
                "OPENWORLD_SERVE_MAX_IMAGE_PIXELS is too large for OPENWORLD_SERVE_DECODE_MEMORY: "
                f"decoding takes {DECODED_PIXEL_BYTES} bytes per pixel"
            )
        if self.task_max_bytes > self.upload_bytes:
            raise ValueError(
                "OPENWORLD_SERVE_TASK_MAX_BYTES is larger than OPENWORLD_SERVE_UPLOAD_BYTES: "
                "a batch of that size could never be sent"
            )
        return self

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
