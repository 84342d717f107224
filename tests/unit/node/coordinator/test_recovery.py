"""How long an interruption lasted."""

from node.coordinator.reporter import Recovery


def test_an_interruption_is_reported_once_and_counts_from_the_first() -> None:
    recovery = Recovery()
    recovery.placed(1.0)
    assert recovery.over(step=0, now=2.0, state_bytes=1000, rate=1e6) is None
    for at in (5.0, 7.0):
        recovery.interrupted(at)
        recovery.placed(at + 1.0)
    told = recovery.over(step=2, now=11.0, state_bytes=60_000_000, rate=2_000_000.0)
    assert told is not None and (told.step, told.seconds) == (2, 6.0)
    # The last placement was at 8; ten seconds, and the state at the rate of the slowest line.
    assert " 3 s " in told.text and told.text.endswith("= 40 s")
    assert recovery.over(step=2, now=12.0, state_bytes=500, rate=0.0) is None
