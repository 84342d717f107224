"""A laboratory profile: what to run, over which links, and how to measure. Frozen dataclasses, no reading.

`node.lab.profile_file` reads and checks the TOML. Every field's meaning is given beneath it.
"""

from dataclasses import dataclass, field

from node.config.schema import RunConfig, Window
from node.lab.shape import Shape


@dataclass(frozen=True, kw_only=True)
class LabSection:
    """`[lab]`: what is measured, and how often."""

    name: str = "lab"
    """Names the output directory and the figures."""
    base: str = ""
    """A run file, relative to the profile, that the profile's own run sections change; empty: the
    defaults."""
    steps: int = 5
    """Steps measured in each cell."""
    warmup_steps: int = 2
    """Steps discarded after each change of the links."""
    warmup_round_trips: int = 120
    """Steps are discarded for so many round trips at least, and then until one is no faster than those
    before: TCP finds a rate in round trips, not in steps."""
    unthrottled_steps: int = 3
    """Steps measured without any shaping at the start of each run, for the compute time; 0 leaves them
    out."""
    seeds: tuple[int, ...] = (0,)
    """Every run is repeated with each of these as `run.seed`."""
    text_bytes: int = 0
    """Train on the first so many bytes of the text alone, so that samples come again (`aqsgd-b` packs nothing
    before they do); 0: all of it."""
    device: str = "cpu"
    """`cpu`, or `cuda`: stage i computes on GPU i."""
    threads: int = 1
    """CPU threads of each node; 0 is torch's own choice."""
    time_limit_seconds: float = 0.0
    """No cell begins after so long; the results so far stand. 0 is no limit."""
    step_seconds: float = 600.0
    """The longest that a single step may take before the lab gives up."""


@dataclass(frozen=True, kw_only=True)
class NetworkSection:
    """`[network]`: how the nodes are joined."""

    topology: str = "links"
    """`links`: each pair of neighbours has a link of its own. `interfaces`: each node has one line, which all
    its neighbours share, as at home."""
    qdisc: str = "tbf"
    """The kernel's shaper, on both ends: `tbf` or `htb`."""
    delay: str = "auto"
    """Delay by `netem`, by the lab's own packet `relay`, or `auto`: netem where the kernel has it."""
    matrix: str = ""
    """A file of rates and round trips between regions, relative to the profile."""
    regions: tuple[str, ...] = ()
    """With `matrix`: each stage's region."""
    tolerance: float = 0.05
    """The share by which a link may be off before it is refused; at most 0.05."""
    socket_buffer_mb: float = 32.0
    """The kernel's limit of a TCP socket's buffers inside the lab, in MB (10^6 bytes); it bounds what one
    connection carries over a long way."""
    congestion_control: str = ""
    """TCP's between nodes: `cubic`, as on most machines, `bbr`, or another that the kernel has; empty: the
    kernel's default."""
    slow_start_after_idle: bool = True
    """Whether TCP forgets a link's rate in a pause and begins slowly again, as machines have it unless
    `net.ipv4.tcp_slow_start_after_idle` is 0."""


@dataclass(frozen=True, kw_only=True)
class SweepSection:
    """`[[sweep]]`: every combination of these is a cell; sweeps and their values run in the order given."""

    rates: tuple[str, ...] = ()
    """Mbit/s, `"100"` or `"UP/DOWN"` as in `"100/20"`. On links up is from the lower stage to the higher, on
    interfaces out of the node."""
    matrix_shares: tuple[float, ...] = ()
    """With `network.matrix`, in place of `rates`: shares of the matrix's rates."""
    delays_ms: tuple[float, ...] = (0.0,)
    """Round trips in milliseconds; with `network.matrix` they come from there."""
    codecs: tuple[str, ...] = ("fp32/fp32", "tah/fixed-6")
    """Codec pairs, `"FORWARD/BACKWARD"`."""
    microbatches: tuple[int, ...] = ()
    """Values of `training.microbatch`; empty: the run file's."""
    windows: tuple[str, ...] = ()
    """Values of `pipeline.window`, `"auto"` or a number as in `"4"`; empty: the run file's."""
    steps: int = 0
    """Steps measured in each of this sweep's cells; 0: `lab.steps`. Where a link binds, two say enough."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep, worked out: its shapes and the runs' variations, all in order."""

    shapes: tuple[Shape, ...]
    codecs: tuple[tuple[str, str], ...]
    microbatches: tuple[int, ...]
    windows: tuple[Window, ...]
    steps: int
    """Measured in each cell."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A whole profile, checked."""

    lab: LabSection = field(default_factory=LabSection)
    network: NetworkSection = field(default_factory=NetworkSection)
    sweeps: tuple[Sweep, ...]
    config: RunConfig
    """What every run is a variation of."""
    sha256: str
    """Of the profile, its overrides, its run file and its matrix: results of different ones do not mix."""
    file: str
    """The profile's name, without its folders."""
    overrides: tuple[str, ...]
    """As given, but for the folders of absolute paths, which only this machine has."""
