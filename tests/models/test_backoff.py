from models.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.failures == 5


def test_reset_starts_again_with_the_first_pause() -> None:
    backoff = Backoff(1.0, 60.0, factor=3)
    assert [backoff.next(), backoff.next()] == [1.0, 3.0]
    backoff.reset()
    assert (backoff.failures, backoff.next()) == (0, 1.0)


def test_jitter_shortens_a_pause_by_at_most_its_share() -> None:
    backoff = Backoff(8.0, 8.0, jitter=0.5)
    pauses = [backoff.next() for _ in range(200)]
    assert min(pauses) >= 4.0
    assert max(pauses) <= 8.0
    assert len(set(pauses)) > 100


def test_thousands_of_failures_do_not_overflow() -> None:
    backoff = Backoff(1.0, 60.0)
    assert [backoff.next() for _ in range(5000)][-1] == 60.0
