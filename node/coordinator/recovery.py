"""How long a run took to get over an interruption, told beside how long it should take. Pure."""

from node.telemetry.events import Recovered
from node.telemetry.units import bytes_text, duration_text

BASE_SECONDS = 10.0
"""What a start, a placement and warm links may take; fetching a stage's state comes on top."""


class Recovery:
    """Times of one interruption, in seconds on any monotonic clock."""

    def __init__(self) -> None:
        self._interrupted_at: float | None = None
        self._placed_at: float | None = None

    def interrupted(self, now: float) -> None:
        """An epoch ended early; what interrupts its successor before a step is done counts to the first."""
        if self._interrupted_at is None:
            self._interrupted_at = now

    def placed(self, now: float) -> None:
        """There are nodes for every stage again."""
        self._placed_at = now

    def over(self, *, step: int, now: float, state_bytes: int, rate: float) -> Recovered | None:
        """What to tell once every stage holds the state of `step`; None if nothing was interrupted.

        Args:
            state_bytes: weights and optimizer state of the largest stage.
            rate: bytes a second from the coordinator to the slowest node; 0 when it is not known.
        """
        interrupted_at, self._interrupted_at = self._interrupted_at, None
        if interrupted_at is None or self._placed_at is None:
            return None
        limit = f"{BASE_SECONDS:g} s + {bytes_text(state_bytes)} of state"
        if rate > 0:
            seconds = BASE_SECONDS + state_bytes / rate
            limit += f" / {bytes_text(rate)}/s = {duration_text(seconds)}"
        text = (
            f"back at step {step} in {duration_text(now - interrupted_at)}, of which "
            f"{duration_text(now - self._placed_at)} since a node was there for every stage; "
            f"expected at most {limit}"
        )
        return Recovered(text=text, step=step, seconds=now - interrupted_at)
