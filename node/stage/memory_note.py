"""What a node remembers of a stage that its memory did not hold, so that it does not offer to hold it again.

A service manager starts a node again that has ended. It would be given the same stage, and run out again, for
ever: so for a day it offers less than that stage needs, and the coordinator gives the stage to others.
"""

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from node.telemetry.format import bytes_text
from wire.identity.enrolment import Hardware
from wire.identity.files import write_private

log = logging.getLogger(__name__)

NOTE_FILE = "out-of-memory.json"
VALID_SECONDS = 86_400.0


@dataclass(frozen=True)
class MemoryNote:
    """Of one node, which was started with these options; with others it is another matter."""

    directory: Path
    """The node's state directory, of one run."""
    most_bytes: int
    """As `--max-memory` says; 0 if it does not."""

    def write(self, hardware: Hardware, need: int) -> None:
        """A stage that was estimated to need so many bytes did not fit on these devices."""
        note = {"need": need, "written": time.time(), "of": self._of(hardware)}
        try:
            write_private(self.directory / NOTE_FILE, json.dumps(note).encode())
        except OSError as error:
            log.warning("this node may be given the same stage again: %s", error)

    def limit(self, hardware: Hardware) -> Hardware:
        """The hardware with no more memory than a newer note leaves; says so in the log."""
        path = self.directory / NOTE_FILE
        try:
            note = json.loads(path.read_bytes())
            need, age, of = int(note["need"]), time.time() - float(note["written"]), note["of"]
        except (OSError, ValueError, KeyError, TypeError):
            return hardware
        if of != self._of(hardware) or not 0 <= age < VALID_SECONDS or hardware.memory_bytes < need:
            return hardware
        log.warning(
            "a stage that was estimated to need %s ran out of memory here: this node offers less than that "
            "for a day (another --max-memory, or deleting %s, ends it)",
            bytes_text(need),
            path,
        )
        return replace(hardware, memory_bytes=need - 1)

    def _of(self, hardware: Hardware) -> list[str | int]:
        # Not its memory: on a GPU that is what others have left at that moment.
        return [hardware.device, hardware.devices, hardware.tensor_parallel, self.most_bytes]
