"""When the run's state goes to disk: which snapshots are due, under way, and stored. Pure."""

MAX_ASKED = 2
"""Snapshots being uploaded at a time; where links are slower than that, some are left out. Each costs its
nodes a copy of their state."""


class SnapshotSchedule:
    """Of one run. A snapshot is named by the steps that led to it."""

    def __init__(self, *, every: int, newest: int) -> None:
        self.newest = newest
        """The newest one that is complete and on disk; 0 before there is one."""
        self.awaited = False
        """The run goes on when the snapshot asked for last is stored."""
        self._every = every
        self._asked: list[int] = []
        """Those that the epoch asked for and that are not stored yet."""
        self._requested = False

    def request(self) -> None:
        """The operator wants the next one that can be taken, due or not."""
        self._requested = True

    def due(self, step: int) -> bool:
        """Whether the run file asks for one here."""
        return step % self._every == 0

    def wanted(self, step: int) -> bool:
        """Whether to take one here, beside the steps that follow."""
        if not self.due(step) and not self._requested:
            return False
        return self.newest < step and len(self._asked) < MAX_ASKED

    def ask(self, step: int, *, await_it: bool) -> None:
        """One is taken; with `await_it` nothing else happens until it is stored."""
        self._asked.append(step)
        if await_it:
            self.awaited = True
        else:
            self._requested = False

    def stored(self, step: int) -> None:
        self.newest = max(self.newest, step)
        self._asked = [asked for asked in self._asked if asked > self.newest]

    def epoch_over(self) -> None:
        """Whoever was to upload is told otherwise."""
        self.awaited = False
        self._asked.clear()

    def what_is_kept(self) -> str:
        """For the operator of a run that ends."""
        return f"the snapshot of step {self.newest} is intact" if self.newest else "no snapshot was due yet"
