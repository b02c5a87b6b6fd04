"""Runs the Lua scripts of the queue, and waits for the replicas of Redis where that is asked for.

Redis runs a script as a whole or not at all, and every script recognises its repetition. All of them may therefore be
repeated when a connection breaks (`call_redis`).
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib import resources
from typing import Any, Literal, get_args

import redis

from tasks.errors import TaskNotReplicated
from tasks.queue.connection import call_redis

CONFIRM_SECONDS = 1.0  # for the replicas of Redis to confirm a task

Script = Literal[
    "submit",
    "claim",
    "renew",
    "release",
    "cancel",
    "retry",
    "list",
    "counts",
    "oldest",
    "check",
    "export",
    "provisional",
    "note",
]


class Scripts:
    """The scripts of one queue. `settings` reach every script; `replicas` confirm what `run_confirmed` has changed."""

    def __init__(
        self,
        client: redis.Redis,
        prefix: str,
        settings: Mapping[str, Any],
        replicas: int,
        clock: Callable[[], datetime],
    ) -> None:
        self._client, self._prefix, self._settings = client, prefix, dict(settings)
        self._replicas, self._clock = replicas, clock
        prelude = _source("prelude")
        self._sources: dict[Script, str] = {name: prelude + _source(name) for name in get_args(Script)}
        self.scripts = {name: client.register_script(source) for name, source in self._sources.items()}

    def run(self, script: Script, fields: Mapping[str, str] | None = None, /, **arguments: Any) -> list[Any]:
        """Run a script. `fields` are for the task's record; arguments that are None do not reach the script."""
        texts = self._texts(fields, arguments)
        return call_redis(self._client, lambda: self.scripts[script](keys=[self._prefix], args=texts))

    def run_confirmed(self, script: Script, fields: Mapping[str, str] | None = None, /, **arguments: Any) -> list[Any]:
        """The same, and wait until `replicas` have the result; TaskNotReplicated if they do not confirm it in time."""
        if not self._replicas:
            return self.run(script, fields, **arguments)
        texts = self._texts(fields, arguments)
        reply, confirmed = call_redis(self._client, lambda: self._run_and_wait(script, texts))
        if confirmed < self._replicas and reply[0] in ("queued", "existing", "cancelled"):
            raise TaskNotReplicated(
                f"{confirmed} of {self._replicas} replicas of Redis have confirmed the change of task "
                f"{arguments['id']} after {CONFIRM_SECONDS:g} s, so a failure may lose it: send the same request again"
            )
        return reply

    def _run_and_wait(self, script: Script, texts: list[str]) -> tuple[list[Any], int]:
        # On one connection: WAIT counts the replicas that have the last write of its connection, and all before it. The
        # script writes nothing if the task is known. Because of the SET, WAIT covers that task nevertheless.
        pipeline = self._client.pipeline(transaction=False)
        pipeline.eval(self._sources[script], 1, self._prefix, *texts)
        pipeline.set(f"{self._prefix}:confirmed", self._clock().isoformat())
        pipeline.wait(self._replicas, round(CONFIRM_SECONDS * 1000))
        replies = pipeline.execute(raise_on_error=False)  # its errors would quote the whole script
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies[0], int(replies[2])

    def _texts(self, fields: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> list[str]:
        """The arguments of a script: one JSON object, then the fields and values of the record."""
        known = {name: value for name, value in arguments.items() if value is not None}
        # Not ASCII: the client replaces lone surrogates, which Redis cannot decode.
        named = json.dumps(self._settings | {"now": self._clock().isoformat()} | known, ensure_ascii=False)
        return [named, *(text for pair in (fields or {}).items() for text in pair)]


def _source(name: str) -> str:
    return (resources.files("tasks.queue") / "scripts" / f"{name}.lua").read_text("utf-8")
