"""Base classes of all settings, and the settings that several programs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from models.storage import Storage, open_storage
from models.storage.places import CACHE_BYTES

Device = Literal["auto", "cpu", "cuda"]
KEEP = (
    "what a new data folder keeps of taught images: images, features, or statistics, see [privacy.md](privacy.md); "
    "empty: what the folder records, images in a new one"
)


def shared(variable: str, default: Any, description: str, **constraints: Any) -> Any:
    """A field read from `variable`, whatever the prefix of its class."""
    return Field(default, validation_alias=variable, description=description, **constraints)


class Settings(BaseSettings):
    """Settings read from environment variables; constructor arguments, by field name, take precedence."""

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="ignore", frozen=True, populate_by_name=True)

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Field name -> environment variable. Fields that hold a model are set through the constructor only."""
        prefix = cls.model_config["env_prefix"]
        return {
            name: str(field.validation_alias or f"{prefix}{name.upper()}")
            for name, field in cls.model_fields.items()
            if not hasattr(field.annotation, "model_fields")
        }


class StorageSettings(Settings):
    """Where the data folder is."""

    model_config = SettingsConfigDict(env_prefix="OPENWORLD_")

    # Absolute: a Redis server and the URL of its socket take no path that is relative to this process.
    data: Annotated[Path, AfterValidator(Path.absolute)] = shared(
        "OPENWORLD_DATA", Path("data"), "the data folder: versions, images, backbone, inbox"
    )
    store: str | None = shared(
        "OPENWORLD_STORE", None, "object store for versions, images and backbone, like `s3://bucket/prefix`"
    )
    store_cache_bytes: int = shared(
        "OPENWORLD_STORE_CACHE_BYTES", CACHE_BYTES, "bytes of the object store to keep in the data folder", ge=0
    )

    def open_storage(self, *, copies: Path | None = None, test: bool = True) -> Storage:
        """The storage of the data folder: see `models.storage.open_storage`."""
        return open_storage(self.data, self.store, self.store_cache_bytes, copies=copies, test=test)


class ProgramSettings(StorageSettings):
    """What the server and the worker share."""

    redis_url: SecretStr | None = shared(
        "OPENWORLD_REDIS_URL",
        None,
        "Redis with the task queue and the notices of new versions: redis://host:port, unix:///path, or "
        "redis+sentinel://host:port,host:port/service, see [deploy.md](deploy.md#redis-that-fails-over)",
    )
    redis_replicas: int | None = shared(
        "OPENWORLD_REDIS_REPLICAS",
        None,
        "replicas of Redis that must confirm a task before it is accepted; default: 1 with Sentinel, else 0",
        ge=0,
        le=10,
    )
    log_level: Literal["debug", "info", "warning", "error"] = shared(
        "OPENWORLD_LOG_LEVEL", "info", "lowest level to log"
    )
    log_format: Literal["auto", "json", "text"] = shared(
        "OPENWORLD_LOG_FORMAT", "auto", "auto: text on a terminal, else JSON"
    )

    @property
    def confirming_replicas(self) -> int:
        """Not found out by asking Redis: while no replica is connected, tasks would be accepted without one."""
        if self.redis_replicas is not None:
            return self.redis_replicas
        return int(self.redis_url is not None and "+sentinel:" in self.redis_url.get_secret_value())
