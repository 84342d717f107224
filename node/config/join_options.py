"""The options of `thinwire join`."""

from dataclasses import dataclass
from pathlib import Path

MOST_DEVICES = 64
"""The most devices of one node, with one process each. No machine has more GPUs."""

MOST_THREADS = 4096
"""The most CPU threads of one node. No machine has more cores."""

MOST_LIMIT = 1e9
"""The largest Mbit/s or GB. No machine has more, and in bytes it is still a 64-bit number."""


@dataclass(frozen=True, kw_only=True)
class OwnerAllows:
    """What a run may use of this machine besides its devices, as its owner says."""

    store: str = ""
    """The address of an object store, or of a folder in it, in which runs may keep snapshots from this
    machine."""
    hub: tuple[str, ...] = ()
    """Repositories of the hub, as `owner/name`, that may be read with the token of this machine's user."""
    model: Path | None = None
    """This machine's copy of the checkpoint folder from which the run starts."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """The options of one node process."""

    listen: str = "0.0.0.0:0"
    """The host:port at which neighbours' connections are accepted. Port 0 takes a free port. If empty,
    nothing listens, and neighbours connect through a relay."""
    advertise: str = ""
    """The host:port that neighbours dial. If empty, it is the address that the coordinator sees and the
    listening port."""
    state_dir: Path | None = None
    """The folder of the node's key and certificate; None for the default of this run and user."""
    name: str = ""
    """The name that others see for this machine; if empty, they see only its id."""
    device: str = "auto"
    """`auto` (the first GPU of NVIDIA or AMD, else the CPU), `cpu`, `cuda:N`, or `mps` (a Mac's)."""
    gpus: int = 1
    """The number of devices that share the stage, from `device` on; processes if `device` is `cpu`."""
    tensor_parallel: int = 1
    """The number of devices that share each block. It must divide `gpus`; the rest is data parallel."""
    threads: int = 0
    """CPU threads for arithmetic; 0 is torch's default."""
    max_bandwidth_mbit: float = 0.0
    """The upload limit in Mbit/s; 0 for no limit."""
    map_port: bool = True
    """Ask the router for a port that leads to this node."""
    relay_mbit: float = 0.0
    """Mbit/s carried between other nodes that cannot reach each other; 0 for none."""
    max_memory_gb: float = 0.0
    """The memory limit of a stage in GB (10^9 bytes); 0 for all of the device's memory."""
    max_host_memory_gb: float | None = None
    """The limit in GB (10^9 bytes) of the main memory to which a GPU's stage may move data: 0 for none, None
    for half of what is free. It is page-locked, so other programs cannot use it meanwhile."""
    yield_gpu: float = 0.0
    """Pause between microbatches while other programs use at least this many percent of the GPU; 0 never
    pauses."""
    max_disk_gb: float = 0.0
    """The disk limit of snapshot layers in GB (10^9 bytes); 0 for half of what is free."""
    allows: OwnerAllows = OwnerAllows()
    metrics: str = ""
    """The host:port of this node's Prometheus metrics; empty for none."""
    wait_seconds: float = 3600.0
    """How many seconds to wait for a coordinator that is not up yet, or for a stopped run to continue; 0 does
    not wait."""
    json: bool = False
    """Print progress to stdout as JSON lines instead of text."""
