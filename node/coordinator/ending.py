"""How a run comes to its end: who asked for it or what cannot be mended, and what is said of it. Pure."""

from node.coordinator.failures import GiveUp, Verdict


class Ending:
    """Of one run. Once it is due, what stages hold goes to disk, if it can be had, and the run stops."""

    def __init__(self) -> None:
        self._tried = False
        self._asked: str | None = None
        self._given_up: GiveUp | None = None

    @property
    def due(self) -> bool:
        return self._asked is not None or self._given_up is not None

    def ask(self, reason: str) -> None:
        """The operator wants it."""
        self._asked = self._asked or reason

    def give_up(self, verdict: GiveUp) -> None:
        """A failure ends the run."""
        self._given_up = verdict

    def saves_once(self, verdict: Verdict) -> bool:
        """Whether the nodes of the epoch that failed are placed again, to hand in what they hold: once."""
        if not self.due or self._tried or not verdict.saves:
            return False
        self._tried = True
        return True

    def last_words(self, kept: str) -> tuple[str, bool]:
        """Why the run ends, and whether it failed. `kept`: what of it is on disk."""
        if self._given_up is not None:
            return f"{self._given_up.why}; {kept}: {self._given_up.remedy}", True
        return self._asked or "", False
