"""The options of `thinwire join`."""

from dataclasses import dataclass
from pathlib import Path

MOST_DEVICES = 64
"""Devices of one node, a process each: more than any machine has GPUs."""

MOST_THREADS = 4096
"""CPU threads of one node: more than any machine has cores."""

MOST_LIMIT = 1e9
"""Largest Mbit/s or GB: more than any machine has, and in bytes still a 64-bit number."""


@dataclass(frozen=True, kw_only=True)
class OwnerAllows:
    """What a run may use of this machine besides its devices, as its owner says."""

    store: str = ""
    """Address of an object store, or of a folder in it, that runs may keep snapshots in from this machine."""
    hub: tuple[str, ...] = ()
    """Repositories of the hub, as `owner/name`, that may be read with the token of this machine's user."""
    model: Path | None = None
    """This machine's copy of the checkpoint folder that the run starts from."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Options of one node process."""

    listen: str = "0.0.0.0:0"
    """host:port to accept neighbours' connections on; port 0 takes a free one; empty: nothing listens, and
    neighbours come by a relay."""
    advertise: str = ""
    """host:port that neighbours dial; empty is the address the coordinator sees and the port listened on."""
    state_dir: Path | None = None
    """Holds the node's key and certificate; None is the default for this run and user."""
    name: str = ""
    """What others see this machine called; empty shows its id alone."""
    device: str = "auto"
    """`auto` (the first GPU of NVIDIA or AMD, else the CPU), `cpu`, `cuda:N`, or `mps` (a Mac's)."""
    gpus: int = 1
    """Devices that share the stage, from `device` on; processes if that is `cpu`."""
    tensor_parallel: int = 1
    """Devices that share each block; divides `gpus`. The rest is data parallel."""
    threads: int = 0
    """CPU threads for arithmetic; 0 is torch's default."""
    max_bandwidth_mbit: float = 0.0
    """Upload limit in Mbit/s; 0 is no limit."""
    map_port: bool = True
    """Ask the router for a port that leads to this node."""
    relay_mbit: float = 0.0
    """Mbit/s carried between other nodes that cannot reach each other; 0 is none."""
    max_memory_gb: float = 0.0
    """Memory limit of a stage in GB (10^9 bytes); 0 is all of the device's."""
    max_host_memory_gb: float | None = None
    """Limit of the main memory that a GPU's stage may move to, in GB (10^9 bytes): 0 is none, None half of
    what is free. It is page-locked: other programs cannot have it meanwhile."""
    yield_gpu: float = 0.0
    """Pause between microbatches while other programs use so many percent of the GPU; 0 never pauses."""
    max_disk_gb: float = 0.0
    """Limit of what layers of snapshots take on disk, in GB (10^9 bytes); 0 is half of what is free."""
    allows: OwnerAllows = OwnerAllows()
    metrics: str = ""
    """host:port of this node's Prometheus metrics; empty serves none."""
    wait_seconds: float = 3600.0
    """How long to wait for a coordinator that is not up yet, and for a stopped run to go on; 0 does not."""
    json: bool = False
    """Progress on stdout as JSON lines instead of text."""
