"""`--measure`: measures a block of the run on this machine's device, in a process that loads torch."""

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.config.schema import RunConfig
    from node.tuning.block_times import BlockTimes


def measured_times(config: "RunConfig", device: str) -> "BlockTimes":
    """Measure the times of a block. Raises UserError if this machine lacks the device or cannot compute."""
    from node import program
    from node.run_file.loader import to_json
    from node.tuning.block_times import BlockTimes
    from wire.errors import UserError

    # Only that process loads torch.
    command = [*program("stage.block_measure"), device]
    done = subprocess.run(command, input=to_json(config), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"--measure: {lines[-1]}")
    return BlockTimes.from_json(done.stdout)
