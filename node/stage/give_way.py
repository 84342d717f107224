"""Lets other programs, such as a game, use this node's GPU (`thinwire join --yield-gpu`).

Between two microbatches, the node pauses while others use more of the GPU than its owner allows. A pause is
at most a few times as long as the work before it, so the run sees a slow node instead of a lost one.
"""

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from wire.errors import UserError

log = logging.getLogger(__name__)

SLOWEST = 3.0
"""The most that a pause may last, as a multiple of the time since the last pause: a quarter of the speed
remains. The coordinator replaces nodes for which steps wait ten times as long as usual."""
MOST_SECONDS = 10.0
"""The longest pause in seconds, however long a microbatch takes."""
LOOK_SECONDS = 0.1
ASK_SECONDS = 2.0
"""The seconds between two readings of the meter."""
PATIENCE_SECONDS = 20.0


class GiveWay:
    """Pauses the compute thread while other programs use the GPU. Call `pause` on the compute thread."""

    def __init__(
        self,
        use: Callable[[], float],
        most: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """
        Args:
            use: others' share of the GPU now, in percent. It must not block.
            most: the share, in percent, from which the node pauses.
        """
        self._use = use
        self._most = most
        self._clock = clock
        self._wait = wait or threading.Event().wait
        self._since = clock()
        """The end of the last pause."""

    def pause(self, check: Callable[[], None]) -> None:
        """Call between two microbatches. Return when others use less, or the pause was long enough.

        `check` raises if the step was interrupted.
        """
        began = self._clock()
        longest = min(MOST_SECONDS, SLOWEST * (began - self._since))
        while self._use() >= self._most and self._clock() - began < longest:
            check()
            self._wait(LOOK_SECONDS)
        self._since = self._clock()


class OtherUse:
    """How much of a GPU other programs use. A thread asks the driver's `nvidia-smi`. Call the object for the
    newest reading."""

    def __init__(self, gpu: str, ask: Callable[[str], str] | None = None) -> None:
        """
        Args:
            gpu: its UUID.
            ask: returns the output of `nvidia-smi pmon` for it.

            Raises UserError if the driver does not report the use.
        """
        self._gpu, self._ask = gpu, ask or _pmon
        self._percent = self._read()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_reading, name="gpu-use", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def __call__(self) -> float:
        return self._percent

    def _keep_reading(self) -> None:
        while not self._closed.wait(ASK_SECONDS):
            try:
                self._percent = self._read()
            except UserError as error:
                # Training continues when the driver no longer answers.
                log.warning("%s; this node no longer pauses for other programs", error)
                self._percent = 0.0
                return

    def _read(self) -> float:
        return others_percent(self._ask(self._gpu), _own_processes())


def others_percent(table: str, own: Collection[int]) -> float:
    """The GPU share of processes other than `own`, in percent, from a table of `nvidia-smi pmon`.

    Raises UserError for a table without these columns.
    """
    lines = [line.split() for line in table.splitlines() if line.strip()]
    names = next((line[1:] for line in lines if line[0] == "#" and {"pid", "sm"} <= set(line)), None)
    if names is None:
        raise UserError("--yield-gpu: nvidia-smi pmon does not say which process uses the GPU")
    process, share = names.index("pid"), names.index("sm")
    rows = [line for line in lines if line[0] != "#" and len(line) > max(process, share)]
    return sum(
        float(row[share])
        for row in rows
        if row[process].isdecimal() and row[share].isdecimal() and int(row[process]) not in own
    )


def _own_processes() -> set[int]:
    """This process and its children, as listed by Linux; on other systems only this process."""
    own = {os.getpid()}
    with contextlib.suppress(OSError):
        listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="ascii")
        own |= {int(word) for word in listed.split()}
    return own


def _pmon(gpu: str) -> str:
    """The output of `nvidia-smi pmon`. Raises UserError."""
    words = ["nvidia-smi", "pmon", "-c", "1", "-s", "u", "-i", gpu]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"--yield-gpu asks nvidia-smi who uses the GPU, but it does not run here ({error}): leave the "
            "option out"
        ) from None
    if asked.returncode != 0:
        reason = (asked.stdout + asked.stderr).strip().splitlines() or [f"exit code {asked.returncode}"]
        raise UserError(
            f"--yield-gpu asks nvidia-smi who uses the GPU, but it cannot tell ({reason[-1]}): leave the "
            "option out (WSL's driver never reports it)"
        )
    return asked.stdout
