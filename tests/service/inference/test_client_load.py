"""A client is heavy if it sends far more images than the other active ones."""

from dataclasses import dataclass

import pytest

from service.inference.client_load import WINDOW, ClientLoad


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def counted(clock: Clock, **images: int) -> ClientLoad:
    load = ClientLoad(clock)
    for client, number in images.items():
        for _ in range(number):
            load.count(client)
    return load


@pytest.mark.parametrize(
    ("images", "heavy"),
    [
        ({"a": 1000}, ""),
        ({"a": 20, "b": 20}, ""),
        ({"a": 40, "b": 20}, ""),
        ({"a": 41, "b": 20}, "a"),
        ({"a": 45, "b": 45, "c": 10}, ""),
        ({"a": 100, "b": 100, "c": 5, "d": 5}, "ab"),
        ({"a": 3, "b": 2, "c": 1, "d": 2}, ""),
    ],
)
def test_clients_are_compared_with_the_mean_of_the_others(images: dict[str, int], heavy: str) -> None:
    load = counted(Clock(), **images)
    assert "".join(client for client in "abcde" if load.is_heavy(client)) == heavy


def test_a_client_that_stopped_does_not_count() -> None:
    clock = Clock()
    load = counted(clock, a=100, b=10)
    clock.now += WINDOW
    load.count("a")
    assert load.is_heavy("a")  # b was active in the window before
    clock.now += WINDOW
    load.count("a")
    assert not load.is_heavy("a")


def test_after_a_pause_nothing_is_left() -> None:
    clock = Clock()
    load = counted(clock, a=100, b=10)
    clock.now += 2 * WINDOW
    load.count("b")
    assert not load.is_heavy("a")
    assert not load.is_heavy("b")
