"""What a node is doing, shown to its owner: stage, step, speed, and the rates of compute and transfer.

Before the first step, it shows what the node waits for: compilation, neighbours, or bytes of its state.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from node.config.schema import RunConfig
from node.run_file.addresses import page_listen, shares_port
from node.telemetry.format import bytes_text, count_text, duration_text
from wire.identity.names import join_address, split_address

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""The seconds between two readings of a node's clock and links."""
WINDOW_SECONDS = 10.0
"""The time in seconds over which rates are averaged."""
SHOWN_SECONDS = 0.05
"""Parts of the time before the first step that are shorter are not shown."""
STEPS_REMEMBERED = 15
FIRST_STEP = "computing its first step, which compiles kernels"
TAKING = "taking its stage"


class Shows(Protocol):
    """Shows the owner of a machine what its node is doing (`node.display.volunteer`)."""

    def __call__(self, text: str) -> None:
        """Print a separate line."""
        ...

    def now(self, what: str, detail: str = "") -> None:
        """Show what the node is doing until the next call. `detail` changes often."""
        ...


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A node's totals at one time. They grow, and restart at 0 with each epoch."""

    computing: float
    """The seconds of forward, backward and optimizer."""
    sent: int
    received: int
    """The bytes received over links to neighbours."""


class Progress:
    """Counts steps and bytes. `line` is the text to show. Call it on the event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, tell: Callable[[str], None] = log.info
    ) -> None:
        """`tell` prints a line for the owner."""
        self._clock = clock
        self.tell = tell
        self._steps = 0
        self._place = ""
        self._doing = ""
        self._since = 0.0
        self._waits: dict[str, float] | None = {}
        """The seconds of each activity before the end of the first step; None afterwards."""
        self._fetching: tuple[int, int] | None = None
        """The bytes of the state that have arrived, and the expected total."""
        self._done = 0
        self._seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._last_step = 0.0
        self._readings: deque[tuple[float, Reading]] = deque()
        self._sent = self._received = 0
        self.own_steps = 0
        """The steps in which this node took part."""

    def goes_on(self, before: "Progress") -> None:
        """Continue after a pause of the run: add what this machine contributed before."""
        self.own_steps, self._sent, self._received = before.own_steps, before._sent, before._received

    def joined(self, steps: int) -> None:
        """Set the number of the run's steps."""
        self._steps = steps

    def placed(self, place: str) -> None:
        """The node has got a stage, such as "stage 1 of 4"."""
        self._begin(place, "")

    def _begin(self, place: str, what: str) -> None:
        self._place, self._fetching = place, None
        self._turn_to(what)
        self._seconds.clear()
        self._readings.clear()
        self._last_step = 0.0

    def idle(self, why: str) -> None:
        self._begin("", why)

    def doing(self, what: str) -> None:
        """The node is doing something other than a usual step."""
        self._fetching = None
        self._turn_to(what)

    def fetching(self, total: int) -> None:
        """The stage's state, of about `total` bytes, is being fetched."""
        self._fetching = 0, total
        self._turn_to("fetching its state")

    def came(self, count: int) -> None:
        """Count bytes of the state that have arrived."""
        if self._fetching is not None:
            self._fetching = self._fetching[0] + count, self._fetching[1]

    def step_begins(self) -> None:
        """A step begins. The first one of an epoch takes longer."""
        self._fetching = None
        self._turn_to("" if self._last_step else FIRST_STEP)

    def step_done(self, step: int) -> None:
        now = self._clock()
        if self._last_step:
            self._seconds.append(now - self._last_step)
        self._turn_to("")
        self._last_step, self._done = now, step
        self.own_steps += 1
        if waits := self._waits:
            each = [f"{what} {seconds:.1f} s" for what, seconds in waits.items() if seconds >= SHOWN_SECONDS]
            line = f"the first step ended {sum(waits.values()):.1f} s after this node joined"
            self.tell(": ".join(filter(None, (line, ", ".join(each)))))
        self._waits = None

    def _turn_to(self, what: str) -> None:
        now = self._clock()
        if self._waits is not None and self._since:
            before = self._doing or TAKING
            self._waits[before] = self._waits.get(before, 0.0) + now - self._since
        self._doing, self._since = what, now

    def read(self, reading: Reading) -> None:
        """Take the current totals."""
        now = self._clock()
        before = self._readings[-1][1] if self._readings else reading
        self._sent += max(0, reading.sent - before.sent)
        self._received += max(0, reading.received - before.received)
        self._readings.append((now, reading))
        while len(self._readings) > 2 and now - self._readings[1][0] >= WINDOW_SECONDS:
            self._readings.popleft()

    @property
    def is_training(self) -> bool:
        """Whether the node is computing usual steps."""
        return bool(self._place) and not self._doing and bool(self._last_step)

    def line(self) -> tuple[str, str]:
        """What the node is doing, and its progress; empty if there is nothing to show."""
        if not self.is_training:
            detail = ""
            if self._fetching is not None and self._fetching[0]:
                came, total = self._fetching
                detail = f"{bytes_text(min(came, total))} of {bytes_text(total)}"
            return ", ".join(part for part in (self._place, self._doing) if part), detail
        parts = [f"step {self._done}/{self._steps}"]
        if self._seconds:
            parts.append(f"{duration_text(statistics.median_low(self._seconds))} per step")
        parts += self._rates()
        if self._seconds:
            left = (self._steps - self._done) * statistics.median_low(self._seconds)
            parts.append(f"{duration_text(left)} to go")
        return self._place, "   ".join(parts)

    def thanks(self) -> str:
        """This node's contribution, shown at the end; empty if it took part in no step."""
        if not self.own_steps:
            return ""
        steps = f"{count_text(self.own_steps)} step{'' if self.own_steps == 1 else 's'}"
        crossed = f", {bytes_text(self._sent)} sent, {bytes_text(self._received)} received"
        return f"thank you: {steps} computed here{crossed if self._sent or self._received else ''}"

    def _rates(self) -> list[str]:
        if len(self._readings) < 2:
            return []
        (then, first), (now, last) = self._readings[0], self._readings[-1]
        seconds = now - then
        if seconds <= 0 or last.computing < first.computing:
            return []
        up, down = (
            8e-6 * max(0, after - before) / seconds
            for before, after in ((first.sent, last.sent), (first.received, last.received))
        )
        computing = min(1.0, (last.computing - first.computing) / seconds)
        return [f"computing {computing:.0%}", f"up {up:.3g} down {down:.3g} Mbit/s"]


def page_address(config: RunConfig, control_address: str) -> str:
    """The URL of the run's page, as seen from this node; empty if the node cannot reach it."""
    listen = page_listen(config)
    if listen is None:
        return ""
    host, port = split_address(control_address)
    if not shares_port(config):
        own_host, port = listen
        is_local = own_host in ("127.0.0.1", "::1", "localhost") and host not in ("127.0.0.1", "::1")
        if not port or is_local:
            return ""
    return f"{'https' if config.dashboard.tls else 'http'}://{join_address(host, port)}/"
