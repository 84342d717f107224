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
        self._damaged = 0
        """One that is, and that no older whole one can stand in for; 0 for none."""

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

    def damaged(self, step: int, whole: int) -> None:
        """It turns out that one is. `whole`: the newest that is not; 0 if none is.

        If it is the newest, the next step that ends has one: until then a failure costs many steps.
        """
        if step != self.newest:
            return
        self._damaged = 0 if whole else step
        self.newest = whole or step
        self._requested = True

    def epoch_over(self) -> None:
        """Whoever was to upload is told otherwise."""
        self.awaited = False
        self._asked.clear()

    def what_is_kept(self) -> str:
        """For the operator of a run that ends."""
        if not self.newest:
            return "no snapshot is complete yet"
        if self.newest == self._damaged:
            return f"the snapshot of step {self.newest} is damaged and no older one is whole"
        return f"the snapshot of step {self.newest} is intact"
