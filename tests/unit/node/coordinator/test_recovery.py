"""The line about an interruption: its own times, and the formula with its own numbers."""

from node.coordinator.reporter import Recovery


def test_nothing_is_said_without_an_interruption() -> None:
    recovery = Recovery()
    recovery.placed(1.0)
    assert recovery.over(step=0, now=2.0, state_bytes=1000, rate=1e6) is None


def test_an_interruption_is_reported_once_with_the_formula() -> None:
    recovery = Recovery()
    recovery.placed(1.0)
    recovery.interrupted(5.0)
    recovery.placed(25.0)
    told = recovery.over(step=40, now=33.0, state_bytes=60_000_000, rate=2_000_000.0)
    assert told is not None and (told.step, told.seconds) == (40, 28.0)
    assert told.text == (
        "back at step 40 in 28 s, of which 8 s since a node was there for every stage; "
        "expected at most 10 s + 60 MB of state / 2 MB/s = 40 s"
    )
    assert recovery.over(step=40, now=34.0, state_bytes=60_000_000, rate=2_000_000.0) is None


def test_an_interruption_of_a_recovery_counts_from_the_first() -> None:
    recovery = Recovery()
    for at in (5.0, 7.0):
        recovery.interrupted(at)
        recovery.placed(at + 1.0)
    told = recovery.over(step=2, now=11.0, state_bytes=500, rate=0.0)
    assert told is not None and told.seconds == 6.0
    assert told.text == (
        "back at step 2 in 6 s, of which 3 s since a node was there for every stage; "
        "expected at most 10 s + 500 B of state"
    )
