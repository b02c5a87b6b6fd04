"""The check of a Redis server at the start of a program: version, durability, eviction, replication."""

import logging
from typing import Any

import redis

from tasks.errors import QueueUnsuitable
from tasks.queue.connection import connect

OLDEST = (6, 2)  # XAUTOCLAIM

log = logging.getLogger(__name__)


def check_redis(url: str, replicas: int = 0) -> list[str]:
    """Log what may lose tasks, and return it. QueueUnsuitable if the server cannot be used.

    A server that cannot be reached is not checked: it may start later, and predictions do not need it.
    """
    client = connect(url, patient=False)
    try:
        info: Any = client.info()
        settings = _settings(client)
    except redis.AuthenticationError as error:
        raise QueueUnsuitable(
            f"Redis refuses the user or the password ({error}): correct OPENWORLD_REDIS_URL"
        ) from error
    except redis.RedisError as error:
        log.warning(
            "Redis was not checked, it does not answer now (%s): tasks cannot be submitted until it does", error
        )
        return []
    finally:
        client.close()
    _refuse_unsuitable(info, settings)
    warnings = _warnings(info, settings, replicas)
    for warning in warnings:
        log.warning("%s", warning)
    return warnings


def _settings(client: redis.Redis) -> dict[str, str]:
    """Those that matter; none if the server does not tell them."""
    found: dict[str, str] = {}
    try:
        for name in ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy"):
            found |= {str(key): str(value) for key, value in client.config_get(name).items()}
    except redis.ResponseError as error:  # managed services forbid CONFIG
        log.info(
            "Redis does not tell its configuration (%s): make sure that appendonly is yes and maxmemory-policy is "
            "noeviction, or tasks may be lost",
            error,
        )
    return found


def _refuse_unsuitable(info: dict[str, Any], settings: dict[str, str]) -> None:
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < OLDEST:
        raise QueueUnsuitable(f"Redis {version} is too old: use Redis 6.2 or newer, or Valkey")
    # INFO tells the policy also where CONFIG is forbidden.
    policy = settings.get("maxmemory-policy") or str(info.get("maxmemory_policy", ""))
    limit = int(settings.get("maxmemory") or info.get("maxmemory") or 0)
    if limit and policy.startswith("allkeys"):
        raise QueueUnsuitable(
            f"Redis has maxmemory {limit} and maxmemory-policy {policy}, so it would delete tasks when its memory is "
            "full: run `CONFIG SET maxmemory-policy noeviction`, and set it in redis.conf"
        )


def _warnings(info: dict[str, Any], settings: dict[str, str], replicas: int) -> list[str]:
    found = []
    appends = settings.get("appendonly") == "yes" or bool(info.get("aof_enabled"))
    connected = int(info.get("connected_slaves", 0))
    if not appends:
        found.append(
            "Redis has appendonly no: a restart of Redis loses accepted tasks; run `CONFIG SET appendonly yes`, and "
            "set it in redis.conf"
        )
    elif settings.get("appendfsync") in ("everysec", "no") and not replicas:
        found.append(
            f"Redis has appendfsync {settings['appendfsync']}: a power cut loses the tasks of the last seconds; run "
            "`CONFIG SET appendfsync always`, and set it in redis.conf"
        )
    if connected and not replicas:
        found.append(
            f"Redis has {connected} replicas, which need not have an accepted task: a failover may lose it; set "
            "OPENWORLD_REDIS_REPLICAS=1"
        )
    if connected < replicas:
        found.append(
            f"Redis has {connected} replicas and OPENWORLD_REDIS_REPLICAS is {replicas}: tasks are answered with 503 "
            "until enough replicas are connected"
        )
    return found
