"""What `thinwire join` was asked for on its command line."""

from dataclasses import dataclass
from pathlib import Path

MOST_DEVICES = 64
"""Of one node, each a process: more than any machine has GPUs."""

MOST_THREADS = 4096
"""Of one node: more than any machine has cores."""

MOST_LIMIT = 1e9
"""Of Mbit/s and of GB: more than any machine has, and in bytes still a number of 64 bits."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Options of one node process."""

    listen: str = "0.0.0.0:0"
    """host:port where neighbours' connections are accepted; port 0 takes a free one."""
    advertise: str = ""
    """host:port that neighbours dial; empty means the host the coordinator sees and the port listened on."""
    state_dir: Path | None = None
    """Where the node's key and certificate live; None means the default for this run and user."""
    device: str = "auto"
    """`auto` (the first GPU, else the CPU), `cpu` or `cuda:N`."""
    gpus: int = 1
    """Devices of this machine that share the stage, from `device` on; processes, if that is `cpu`."""
    tensor_parallel: int = 1
    """How many of these devices share each block; divides `gpus`. The rest is data parallel."""
    threads: int = 0
    """CPU threads for arithmetic; 0 leaves torch's default."""
    max_bandwidth_mbit: float = 0.0
    """The most that this node sends, in Mbit/s; 0 is no limit."""
    max_memory_gb: float = 0.0
    """The most memory that a stage may need here, in GB (10^9 bytes); 0 is all of the device's."""
    metrics: str = ""
    """host:port where this node serves its metrics for Prometheus; empty: nowhere."""
    json: bool = False
    """Progress on stdout as JSON lines instead of text."""
