"""Progress on stderr: a bar on a terminal, a line every few seconds otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from trainer.learning.progress import Event

LINE_SECONDS = 5.0


class Display:
    """Shows the trainer's events; call it with each event."""

    def __init__(self) -> None:
        self._phase, self._last = "", float("-inf")
        self._bar: Progress | None = None
        if (console := Console(stderr=True)).is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
            self._bar = Progress(
                *columns, TextColumn("{task.fields[detail]}", markup=False), console=console, transient=True
            )
            self._shown = self._bar.add_task("", total=1.0, detail="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Show a text before the first event."""
        if self._bar:
            self._bar.update(self._shown, description=text)
        else:
            print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if self._bar:
            self._bar.console.print(text, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def __call__(self, event: Event) -> None:
        if self._bar:
            self._bar.update(self._shown, description=event.phase, completed=event.progress, detail=_detail(event))
            return
        now = time.monotonic()
        if event.phase != self._phase or now - self._last >= LINE_SECONDS:
            self._phase, self._last = event.phase, now
            print(f"{event.progress:4.0%} {event.phase}: {_detail(event)}", file=sys.stderr, flush=True)


@contextmanager
def count_done(what: str) -> Iterator[Callable[[int], None]]:
    """A counter on a terminal, nothing otherwise; call the yielded function with the number of items done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda more: None
        return
    columns = (TextColumn(what, markup=False), BarColumn(), TextColumn("{task.completed:.0f}"))
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("", total=None)
        yield lambda more: bar.advance(shown, more)


def _detail(event: Event) -> str:
    """`epoch 3/20, loss 0.412, 2 min left`."""
    unit = "" if event.loss is None else "epoch "
    parts = [f"{unit}{event.epoch}/{event.epochs}"]
    if event.loss is not None:
        parts.append(f"loss {event.loss:.3f}")
    if event.seconds_left is not None:
        parts.append(f"{duration(event.seconds_left)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Rounded: `12 s`, `3 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
