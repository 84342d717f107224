"""Which snapshots are due, under way and stored. Pure."""

MAX_ASKED = 2
"""Snapshots being uploaded at a time; on slower links some are skipped. Each costs its nodes a copy of their
state."""


class SnapshotSchedule:
    """One run's snapshots, named by the number of steps that led to them."""

    def __init__(self, *, every: int, newest: int) -> None:
        self.newest = newest
        """The newest one that is complete and on disk; 0 before there is one."""
        self.awaited = False
        """The run waits until the snapshot asked for last is stored."""
        self._every = every
        self._asked: list[int] = []
        """Steps that the epoch asked for and that are not stored yet."""
        self._requested = False
        self._damaged = 0
        """A damaged snapshot with no older intact one to fall back on; 0 for none."""

    def request(self) -> None:
        """Take the next possible one, due or not."""
        self._requested = True

    def due(self, step: int) -> bool:
        """Whether the run file asks for one after this step."""
        return step % self._every == 0

    def wanted(self, step: int) -> bool:
        """Whether to take one now, while the next steps run."""
        if not self.due(step) and not self._requested:
            return False
        return self.newest < step and len(self._asked) < MAX_ASKED

    def ask(self, step: int, *, await_it: bool) -> None:
        """One is being taken; with `await_it` the run waits until it is stored."""
        self._asked.append(step)
        if await_it:
            self.awaited = True
        else:
            self._requested = False

    def stored(self, step: int) -> None:
        self.newest = max(self.newest, step)
        self._asked = [asked for asked in self._asked if asked > self.newest]

    def damaged(self, step: int, whole: int) -> None:
        """The snapshot of `step` is damaged; `whole` is the newest intact one, 0 for none.

        If it was the newest, take another after the next step: until then a failure costs many steps.
        """
        if step != self.newest:
            return
        self._damaged = 0 if whole else step
        self.newest = whole or step
        self._requested = True

    def epoch_over(self) -> None:
        """Uploads of the epoch may never complete."""
        self.awaited = False
        self._asked.clear()

    def saved_state(self) -> str:
        """What is on disk, for the operator of a run that ends."""
        if not self.newest:
            return "no snapshot is complete yet"
        if self.newest == self._damaged:
            return f"the snapshot of step {self.newest} is damaged and no older one is whole"
        return f"the snapshot of step {self.newest} is intact"
