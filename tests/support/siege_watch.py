"""What a besieged run's processes do and take: steps, processor time, memory and descriptors."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.telemetry.events import StepDone, from_json
from tests.support.process import Coordinator, Process

LOOK_SECONDS = 0.1
"""Between two looks at a process's memory and descriptors."""


@dataclass(frozen=True, kw_only=True)
class Spell:
    """What was seen in a calm time or a siege."""

    speed: float
    """Steps a second."""
    cpu: float
    """CPU seconds a step, of all the run's processes."""
    memory_mb: float
    """The coordinator's at most."""
    descriptors: int
    """The coordinator's at most."""


class SiegeWatch:
    """What the run's processes do and take, in calm times and sieges by turns."""

    def __init__(self) -> None:
        self._done: list[float] = []
        self._spells: list[Spell] = []

    def note(self, process: Process, line: str | None) -> None:
        """A listener of the run's processes."""
        if isinstance(process, Coordinator) and line and isinstance(from_json(line), StepDone):
            self._done.append(time.monotonic())

    @contextlib.contextmanager
    def measure(self, processes: Sequence[Process]) -> Iterator[None]:
        """The block is the next calm time or siege. The coordinator is the first process."""
        began, cpu, steps = time.monotonic(), _cpu_seconds(processes), len(self._done)
        with _looking_at(processes[0]) as seen:
            yield
        ended, used, done = time.monotonic(), _cpu_seconds(processes) - cpu, len(self._done) - steps
        memory, descriptors = zip(*seen, strict=True)
        self._spells.append(
            Spell(
                speed=done / (ended - began),
                cpu=used / max(done, 1),
                memory_mb=round(max(memory) / 1e6, 1),
                descriptors=max(descriptors),
            )
        )

    def ratios(self) -> list[tuple[float, float]]:
        """(speed, CPU) of each siege over the mean of the calm times around it."""
        found = []
        for before, siege, after in zip(self._spells[::2], self.sieges, self._spells[2::2], strict=False):
            speed, cpu = (before.speed + after.speed) / 2, (before.cpu + after.cpu) / 2
            found.append((siege.speed / max(speed, 1e-9), siege.cpu / max(cpu, 1e-9)))
        return found

    @property
    def sieges(self) -> list[Spell]:
        return self._spells[1::2]

    @property
    def memory_mb(self) -> tuple[float, ...]:
        """In the first calm time, then in each siege."""
        return tuple(one.memory_mb for one in (self._spells[0], *self.sieges))


@contextlib.contextmanager
def _looking_at(process: Process) -> Iterator[list[tuple[int, int]]]:
    """Add (bytes of resident memory, open descriptors) of the process to the list, again and again."""
    over, place = threading.Event(), Path(f"/proc/{process.pid}")

    def look() -> tuple[int, int]:
        pages = int((place / "statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), sum(1 for _ in (place / "fd").iterdir())

    seen = [look()]

    def look_again() -> None:
        while not over.wait(LOOK_SECONDS):
            with contextlib.suppress(OSError):  # it has ended
                seen.append(look())

    thread = threading.Thread(target=look_again, name="looking")
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _cpu_seconds(processes: Sequence[Process]) -> float:
    """User and system time that they have used so far."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
