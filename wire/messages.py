"""What a node and the coordinator say to each other, as plain dataclasses (wire form: `messages_proto.py`).

State machines take and return these. Every step number counts from 0; the *state* of step s is what s applied
steps have made of the initial weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from wire.identity.enrolment import Hardware, Refusal
from wire.telemetry import StepSpans, Telemetry

LONGEST_REASON = 240
"""Characters of why a node goes; what is longer is cut."""


class FailureKind(IntEnum):
    """Why a stage could not finish a step."""

    LINK = 1
    NON_FINITE = 2
    INTERNAL = 3
    PEER = 4


# ---- node to coordinator


@dataclass(frozen=True, kw_only=True)
class Hello:
    version: str
    protocol: int
    peer_address: str
    hardware: Hardware
    flops: float
    """Matrix multiplication rate, measured."""
    download_rate: float
    """Bytes a second from the coordinator, measured."""
    epoch: int
    process_nonce: int


@dataclass(frozen=True, kw_only=True)
class Placed:
    epoch: int
    held_step: int
    """The state this process holds for exactly the layers of its new place, or -1."""
    voted: bool
    """Whether it also holds the gradients of step `held_step`, voted for and not yet applied."""
    branch: int = 0
    """The epoch that loaded what the held state grew from; a step may be taken again, on another branch."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    epoch: int
    telemetry: Telemetry
    """What the steps of this epoch are counted from."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """Ready to commit: squared gradient norms by layer unit, and the mean loss from the last stage."""

    epoch: int
    step: int
    norms: Mapping[int, float]
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Applied:
    epoch: int
    step: int
    telemetry: Telemetry


@dataclass(frozen=True, kw_only=True)
class StepFailed:
    epoch: int
    step: int
    kind: FailureKind
    message: str
    peer_stage: int = -1
    """The neighbour at fault, for `FailureKind.PEER`."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    telemetry: Telemetry
    sent_at: float = 0.0
    """On the node's monotonic clock."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    reason: str
    failed: bool = False
    """The node ends now, and what it holds with it; else it asks to go once that is saved."""


NodeMessage = Hello | Placed | Ready | Vote | Applied | StepFailed | Heartbeat | Leave | StepSpans


# ---- coordinator to node


@dataclass(frozen=True, kw_only=True)
class Welcome:
    node_id: str
    config_json: str
    heartbeat_seconds: float
    windows: int = 0
    """Samples of one pass over the text; with the seed it says which samples a step sees."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatReply:
    """From it a node tells its clock from the coordinator's."""

    sent_at: float
    """As the heartbeat said."""
    at: float
    """The coordinator's Unix time when it heard it."""


@dataclass(frozen=True, kw_only=True)
class PlacedStage:
    node_id: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Placement:
    epoch: int
    stage: int
    stages: tuple[PlacedStage, ...]


@dataclass(frozen=True, kw_only=True)
class Begin:
    epoch: int
    step: int
    link_windows: tuple[int, ...] = ()
    """Extra microbatches in flight on each link in this step, the first link first; empty: the run file's."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    epoch: int
    step: int
    clip_coefficient: float
    lr: float


@dataclass(frozen=True, kw_only=True)
class Restore:
    epoch: int
    step: int
    missed: Commit | None = None
    """The commit of the step before, for stages that voted for it and never heard the outcome."""
    uncompressed: bool = False
    """Use `fp32` on every link of this epoch, to tell quantization from divergence."""
    branch: int = 0
    """Of the state that counts as held. Who holds none of it loads `step`, and is on this branch then."""


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """To a node without a stage: keep the snapshot of `step` of these layer units at hand."""

    step: int
    units: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TakeSnapshot:
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Abort:
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    reason: str
    failed: bool


CoordinatorMessage = (
    Welcome
    | Placement
    | Restore
    | Begin
    | Commit
    | TakeSnapshot
    | Prefetch
    | HeartbeatReply
    | Abort
    | Finish
    | Refusal
)
