"""Nodes that live, say nothing of what failed, and do not answer when others long have. Pure.

A node finds most of what may hold it up itself, within ten minutes, and a neighbour that waits for it
complains in as many (`node.stage.watchdog`, `node.stage.inbox`). This is for what remains.
"""

from node.coordinator.epoch import Epoch, Phase

LATE_SECONDS = 900.0
"""Behind the first answer; longer than what nodes and their neighbours allow."""
LATE_TIMES = 3.0
"""As often as the first answer itself took: the stages of a slow pipeline answer one after the other."""


class Laggards:
    """Looks at each step, first its votes and then its end, since somebody has answered."""

    def __init__(self) -> None:
        self._at: tuple[int, int, Phase] | None = None
        self._began = 0.0
        self._first: float | None = None

    def look(self, epoch: Epoch | None, now: float) -> dict[str, str]:
        """Who is too late, and the line for each. Call it often: times count from when it is called."""
        at = (epoch.number, epoch.step, epoch.phase) if epoch is not None else None
        if at != self._at:
            self._at, self._began, self._first = at, now, None
        if epoch is None or epoch.phase not in (Phase.STEPPING, Phase.APPLYING) or not epoch.answered:
            return {}
        if self._first is None:
            self._first = now
        late = now - self._first
        if late <= max(LATE_SECONDS, LATE_TIMES * (self._first - self._began)):
            return {}
        line = f"it did not end step {epoch.step + 1} within {late:.0f} s after another did: start it again"
        return {node: line for node in epoch.seats if node not in epoch.answered}
