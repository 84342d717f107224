"""Messages between a node and the coordinator, as plain dataclasses whose fields declare what is allowed.

`wire.messages_proto` derives their wire form. State machines take and return them. Step numbers start at
0; the *state* of step s is the weights after s applied steps.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, NamedTuple

from wire.declared import (
    LONGEST_SECONDS,
    Amount,
    Finite,
    Line,
    Parsed,
    Present,
    Seconds,
    Size,
    Squared,
    Text,
    Within,
)
from wire.identity.enrolment import Hardware, Refusal
from wire.identity.names import clean_name, is_node_id
from wire.telemetry import CodecTimes, StepSpans, Telemetry

LONGEST_REASON = 240
"""Characters of a node's reason to leave; longer text is cut."""
DIGEST_BYTES = 16
"""The bytes kept of a SHA-256, which are enough that nobody finds other bytes with the same ones."""


def node_id(text: str) -> str:
    """`text` if it is a node's id; otherwise raises ValueError."""
    if not is_node_id(text):
        raise ValueError("not a node's id")
    return text


def sha256_hex(text: str) -> str:
    """`text` if it is a SHA-256 in hex or empty; otherwise raises ValueError."""
    if text and not (len(text) == 64 and set(text) <= set("0123456789abcdef")):
        raise ValueError("not a SHA-256 in hex")
    return text


Sha256 = Annotated[str, Parsed(sha256_hex)]
NodeId = Annotated[str, Parsed(node_id)]
Reason = Annotated[str, Line(LONGEST_REASON)]
Digest = Annotated[bytes, Size(DIGEST_BYTES)]
GroupLoss = Annotated[float, Within(0.0, sys.float_info.max)]
"""A group's part of the mean loss, which is known to be finite."""
FiniteSquares = Annotated[float, Within(0.0, sys.float_info.max)]
"""A sum of squares of what is known to be finite."""


class FailureKind(IntEnum):
    """Why a stage could not finish a step."""

    LINK = 1
    NON_FINITE = 2
    INTERNAL = 3
    PEER = 4


NODES = "nodes"
"""The place of a snapshot whose layers stay on the nodes' disks."""


MOST_HELD = 200
"""The most layers in one report of what a node holds and lacks, and the most holders that it may doubt."""


@dataclass(frozen=True, kw_only=True)
class HeldLayer:
    """A layer unit's file that a node has on its disk, or has put into the run's object store."""

    step: int
    unit: str
    bytes: int
    sha256: Sha256
    weights_sha256: Sha256 = ""


# ---- node to coordinator


@dataclass(frozen=True, kw_only=True)
class Hello:
    version: str
    protocol: int
    peer_address: str
    hardware: Hardware
    flops: Amount
    """Matrix multiplication rate, measured."""
    download_rate: Amount
    """The measured bytes per second from the coordinator."""
    epoch: int
    process_nonce: int
    name: Annotated[str, Parsed(clean_name)] = ""
    """The name that its owner gave it, as `clean_name` returns it."""
    relay_rate: Amount = 0.0
    """The bytes per second that it relays for others; 0: it does not."""
    mapped_port: int = 0
    """A port of its router that leads to the node's own; 0: none."""
    also: tuple[str, ...] = ()
    """Further addresses of its own, host:port: the other of IPv4 and IPv6."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    epoch: int
    held_step: int
    """The step whose state this process holds for exactly its assigned layers, or -1."""
    voted: bool
    """Whether it also holds the gradients of step `held_step`, voted and not yet applied."""
    lineage: int = 0
    """Lineage of the held state: the epoch that loaded it. A replayed step belongs to another lineage."""
    storages: Mapping[Text, Seconds] = field(default_factory=dict)
    """With `storage.allow`: the seconds per microbatch with each storage that fits here, by its name."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    epoch: int
    telemetry: Telemetry
    """Totals before the epoch's first step."""


class BoundaryEnd(NamedTuple):
    """One end of a boundary between two chunks, in one direction."""

    boundary: int
    backward: bool
    """Gradients go over it, else activations."""
    received: bool
    """The end that received them, else the one that sent them."""


@dataclass(frozen=True, kw_only=True)
class GroupDigests:
    """Digests of what a stage computed for one gradient group.

    The same weights and inputs give the same digests in every row whose nodes compute the same bits.
    """

    gradient: Digest
    """The digest of the packed gradient of the stage's layer units."""
    boundaries: Mapping[BoundaryEnd, Digest] = field(default_factory=dict)
    """The digests of the packed tensors of the group's microbatches, in their order."""
    loss: float | None = None
    """The loss of a group that the row computes only to check another row; only where the head is."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """The stage is ready to commit: squared gradient norms by layer unit and, where the head is, the mean
    loss.

    Norms are of the sum over all gradient groups, so they are the same in every row.
    """

    epoch: int
    step: int
    norms: Mapping[int, Squared]
    loss: float | None
    """None if a run has several gradient groups."""
    group_losses: Mapping[int, float] = field(default_factory=dict)
    """The part of the mean loss of each group of its row; from the stage with the head, if there are several
    groups."""
    digests: Mapping[int, GroupDigests] = field(default_factory=dict)
    """With audits: the digests of each group of its row, and of `Begin.audited`."""
    telemetry: Telemetry = field(default_factory=Telemetry)
    generation: int = 0
    """The generation of the newest `Begin` that this answers."""
    sums: Mapping[int, Digest] = field(default_factory=dict)
    """With several rows: the digests of the packed sums over all groups, by layer unit. A row that was sent
    another sum may have the same norms: those of reversed signs, for instance."""

    @property
    def result(self) -> object:
        """What is the same in every row."""
        return tuple(sorted(self.norms.items())), tuple(sorted(self.sums.items()))


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """All that the stage computed of these groups has arrived at the nodes that sum it up, and at those that
    would if this node were gone."""

    epoch: int
    step: int
    generation: int
    """The generation of the `Begin` that says which nodes these are."""
    groups: tuple[int, ...] = ()
    group_losses: Mapping[int, GroupLoss] = field(default_factory=dict)
    """The same as in `Vote`."""
    passed_on: tuple[int, ...] = ()
    """Groups that rows without a node of this stage had handed over to this node: other nodes hold them,
    too."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The answer to a commit after which no step begins at once. Otherwise the vote for the next step says
    the same."""

    epoch: int
    step: int
    telemetry: Telemetry


@dataclass(frozen=True, kw_only=True)
class Validated:
    """A pass over held-out samples is done; the loss comes from the stage with the head."""

    epoch: int
    step: int
    number: int
    loss: float | None
    telemetry: Telemetry


@dataclass(frozen=True, kw_only=True)
class StepFailed:
    epoch: int
    step: int
    kind: FailureKind
    message: Text
    peer_stage: int = -1
    """The neighbour at fault, for `FailureKind.PEER`."""
    peer_replica: int = 0
    """Its row."""


@dataclass(frozen=True, kw_only=True)
class PeerSilent:
    """The connection to a neighbour has closed, or nothing has come by it for a while. It may be dead."""

    epoch: int
    stage: int
    replica: int
    """Its row."""


@dataclass(frozen=True, kw_only=True)
class SumsMissing:
    """What the last node of the own stage in a row said it had handed over did not come, or is bad."""

    epoch: int
    step: int
    replica: int
    """The row that has no node of the stage any more."""


class AwaitedSums(NamedTuple):
    """Summed gradients of the own stage that a node waits for."""

    row: int
    """The row that is to send them."""
    is_total: bool
    """Whether they are over all groups. Else they are over groups of that row, which it sends without waiting
    for other rows."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    telemetry: Telemetry
    sent_at: Finite = 0.0
    """The time on the node's monotonic clock."""
    preparing: bool = False
    """The node tests its device, measures or compiles, and takes no place before that is done."""
    awaited: AwaitedSums | None = None
    """What it waits for, after its own passes of a step."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    reason: Reason
    failed: bool = False
    """True: the node ends now and its state is lost. False: it asks to leave once its state is saved."""


@dataclass(frozen=True, kw_only=True)
class Following:
    """The answer to `Follow` and `FollowStep`."""

    snapshot: int
    """The snapshot with which the node began."""
    step: int
    """The step whose state it holds now."""
    failed: Reason = ""
    """Why it holds none, if it does not."""


class UnitHash(NamedTuple):
    """The state of a layer unit. Where bits may differ, the sums of squares describe it."""

    sha256: Annotated[str, Size(32)]
    """The SHA-256 of its snapshot file, in hex."""
    weights: FiniteSquares = 0.0
    """Sum of squares of its weights."""
    moments: FiniteSquares = 0.0
    """Sum of squares of the optimizer's first moments."""
    squares: FiniteSquares = 0.0
    """Sum of squares of the second moments. Of moments in 8 bits: of the scales of their blocks."""
    weights_sha256: Annotated[str, Size(32, or_none=True)] = ""
    """Of the file of its weights alone, in hex, where that is handed in first."""

    @property
    def hashes(self) -> tuple[str, str]:
        """What nodes agree on."""
        return self.sha256, self.weights_sha256


@dataclass(frozen=True, kw_only=True)
class StateHashes:
    """The answer to `TakeSnapshot`: the state of the node's layers after `step` steps, by layer unit."""

    epoch: int
    step: int
    units: Mapping[int, UnitHash]


RELAY_LEFT = 1e6
"""Seconds in place of the round trip by a relay that a link has left."""


@dataclass(frozen=True, kw_only=True)
class RelayTimes:
    """Round trips in seconds to the relays of `Relays`, by node id; a relay that does not answer is left
    out.

    A relay that a link of this node has left, because another was much faster, has `RELAY_LEFT`.
    """

    times: Mapping[NodeId, Seconds]


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """With measured placement: how long a block of the run takes on this node."""

    seconds: Seconds
    """Forward and backward, a microbatch."""


@dataclass(frozen=True, kw_only=True)
class PeerRate:
    """The answer to `ProbePeer`."""

    node_id: NodeId
    round_trip: Seconds = 0.0
    """The round trip in seconds; 0: the node could not be reached."""
    up: Amount = 0.0
    """The bytes per second to it; 0 if nothing arrived."""
    down: Amount = 0.0
    """The bytes per second from it; 0 if nothing arrived."""


NodeMessage = (
    Hello
    | Placed
    | Ready
    | Vote
    | HandedOver
    | Applied
    | Validated
    | StepFailed
    | PeerSilent
    | SumsMissing
    | Heartbeat
    | Leave
    | StepSpans
    | Following
    | StateHashes
    | RelayTimes
    | BlockTime
    | PeerRate
    | CodecTimes
)


# ---- coordinator to node


@dataclass(frozen=True, kw_only=True)
class Welcome:
    node_id: str
    config_json: str
    heartbeat_seconds: Annotated[float, Within(sys.float_info.min, LONGEST_SECONDS)]
    windows: int = 0
    """Samples in one pass over the text; with the seed it determines which samples a step sees."""


@dataclass(frozen=True, kw_only=True)
class AskHeartbeat:
    """A neighbour does not hear the node: it is to send a heartbeat at once."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatReply:
    """Lets a node measure the offset of its clock to the coordinator's."""

    sent_at: Finite
    """Copied from the heartbeat."""
    at: Finite
    """The coordinator's Unix time at receipt."""
    pause: Amount = 0.0
    """The seconds until the next heartbeat; 0: as in `Welcome`."""


@dataclass(frozen=True, kw_only=True)
class PlacedStage:
    node_id: str
    address: str


class Seat(NamedTuple):
    """A place in the grid of rows and stages."""

    row: int
    stage: int


@dataclass(frozen=True, kw_only=True)
class PlacedRow:
    """A row of the grid, as a node sees it: a thousand of them need not know all of each other."""

    node: PlacedStage
    """The node that hosts the same stage as the node that gets this message."""
    groups: tuple[int, ...]
    """The gradient groups that it computes, a contiguous run."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    epoch: int
    stage: int
    stages: tuple[PlacedStage, ...]
    """The stages of the node's own row."""
    replica: int = 0
    """The node's own row."""
    rows: tuple[PlacedRow, ...] = ()
    """Empty: one row, with all groups. Nodes of one stage in different rows sum their gradients."""
    relays: Mapping[str, tuple[PlacedStage, ...]] = field(default_factory=dict)
    """By neighbour, the volunteers that relay the link to it, the best first; the coordinator's relay comes
    after them."""
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By neighbour, further addresses (host:port) to dial if its first address does not answer."""
    enters: bool = False
    """The epoch is on, and the node takes an empty seat of it: it follows the run until its first `Begin`."""
    renewed: tuple[Seat, ...] = ()
    """Seats that another node, another process of the same one, or nobody has from now on."""

    def contradiction(self) -> str:
        if self.stage >= len(self.stages):
            return f"stage {self.stage} is not one of {len(self.stages)}"
        rows = max(1, len(self.rows))
        return f"replica {self.replica} is not one of {rows} rows" if self.replica >= rows else ""


@dataclass(frozen=True, kw_only=True)
class Relays:
    """The volunteers that now relay for others."""

    relays: tuple[PlacedStage, ...]


@dataclass(frozen=True, kw_only=True)
class ProbePeer:
    """Measure the line to this node (`wire.peer_probe`) and answer with a `PeerRate`."""

    peer: Annotated[PlacedStage, Present()]


@dataclass(frozen=True, kw_only=True)
class RelayFor:
    """Tells a relay that any two of these nodes may be connected, and no others."""

    nodes: tuple[str, ...]


class Portion(NamedTuple):
    """Gradient groups that a row computes in sequence, and whose sums it sends separately."""

    row: int
    groups: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Run a step. It is sent again with a higher `generation` when other nodes have to do its work."""

    epoch: int
    step: int
    link_windows: tuple[int, ...] = ()
    """Extra microbatches in flight on each link in this step, in order of links; empty: the run file's."""
    keep_sums: bool = False
    """Keep this step's summed gradients, packed: newcomers fetch them."""
    audited: tuple[int, ...] = ()
    """Gradient groups of another row, to compute as well and only to give their digests."""
    waited_seconds: Amount = 0.0
    """The part of the node's wait since its last answer in which other stages had not answered yet."""
    loss_scale: Amount = 0.0
    """The loss's factor, of a run that computes in float16; 0 in others. Votes have the norms of gradients of
    the loss times this."""
    digests: bool = False
    """Give the digests of the own groups too, though the run has no audits: one of them is compared."""
    generation: int = 0
    """How often the work of this epoch was shared again; the vote repeats it."""
    portions: tuple[Portion, ...] = ()
    """Which row computes which groups of the step, each group once; empty: as in the placement. Groups of one
    additional row wait, and are given out later."""
    absent: tuple[Seat, ...] = ()
    """Seats of the placement without a node: nothing comes from them, and nothing goes to them."""
    late: tuple[Seat, ...] = ()
    """Seats that were filled within this step: they sum up no other rows' gradients."""
    hands_over: bool = False
    """Seats have been lost lately: report with `HandedOver` what does not depend on this node any more."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    epoch: int
    step: int
    clip_coefficient: Amount
    """0: the step is skipped."""
    lr: Amount
    waited_seconds: Amount = 0.0
    """The same as in `Begin`."""
    then: Begin | None = None
    """The step to begin as soon as this one is applied; its vote says that it is. None: say `Applied`."""


@dataclass(frozen=True, kw_only=True)
class Restore:
    epoch: int
    step: int
    missed: Commit | None = None
    """The previous step's commit, for stages that voted and never got the outcome."""
    uncompressed: bool = False
    """Use `fp32` on every link of this epoch, to distinguish quantization error from divergence."""
    lineage: int = 0
    """Lineage of the state that counts as held. A node without it loads `step` and joins this lineage."""
    activation_codecs: tuple[str, ...] = ()
    """With planned codecs: the codec of each boundary, the first one first; fixed for the epoch."""
    gradient_codecs: tuple[str, ...] = ()
    storages: tuple[str, ...] = ()
    """With several storages allowed: the storage of each stage, the first one first; fixed for the epoch."""


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Fetch these layer units of the snapshot of `step`: a spare in advance, or any node to hold a copy."""

    step: int
    units: tuple[str, ...]
    keep: bool = False
    """Hold a copy, in addition to what was asked for before."""


@dataclass(frozen=True, kw_only=True)
class Retain:
    """The snapshots that count. Older files on this node's disk are not needed."""

    steps: tuple[int, ...]
    record: str = ""
    """JSON that `thinwire recover` needs of the run; empty: no news."""


@dataclass(frozen=True, kw_only=True)
class ShutOut:
    """Nodes that are no longer in the run, though their certificates are still valid: serve them nothing."""

    node_ids: tuple[Text, ...]


@dataclass(frozen=True, kw_only=True)
class SendLayers:
    """Send these layer units, which this node holds, to the coordinator."""

    step: int
    units: tuple[str, ...]
    place: str = ""
    """The folder in an object store that they go to instead."""


@dataclass(frozen=True, kw_only=True)
class Follow:
    """Tells a node that is about to get a stage to load the snapshot of `step`, then to apply each
    `FollowStep`.

    Without sources: stop following.
    """

    step: int
    stage: int = 0
    stages: int = 1
    lineage: int = 0
    """The lineage of the run's state."""
    sources: tuple[PlacedStage, ...] = ()
    """Nodes of this stage, which keep the summed gradients of their steps."""
    storages: tuple[str, ...] = ()
    """The same as in `Restore`."""

    def contradiction(self) -> str:
        impossible = self.sources and self.stage >= self.stages
        return f"stage {self.stage} is not one of {self.stages}" if impossible else ""


@dataclass(frozen=True, kw_only=True)
class FollowStep:
    """A step is committed. `norms` and `sums` are the votes for this stage, which the fetched gradients must
    have."""

    snapshot: int
    """The snapshot of the `Follow` before it."""
    step: int
    clip_coefficient: Amount
    lr: Amount
    norms: Mapping[int, Squared]
    sums: Mapping[int, Digest] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TakeSnapshot:
    """Hand in the state that `step` begins with: between two steps, or within this one, before its commit."""

    epoch: int
    step: int
    place: Text = ""
    """Where its layers go: "" to the coordinator, `NODES`, or an object store's URL."""
    only_hashes: bool = False
    """Hand in nothing: another row does. Say what the layers are and, if their place is `NODES`, keep a copy
    where there is room: a layer that the other row hands in may be refused."""
    attempt: int = 0
    """The attempt of this epoch at this step. What a node handed in or reported in an earlier one is
    forgotten."""


@dataclass(frozen=True, kw_only=True)
class Validate:
    """Run held-out samples forward with the state of `step`, which every stage holds.

    Pass 2b is held-out batch b with the run's codecs, pass 2b + 1 the same batch with fp32 on every link.
    """

    epoch: int
    step: int
    number: int
    microbatches: int
    waited_seconds: Amount = 0.0
    """The same as in `Begin`."""


@dataclass(frozen=True, kw_only=True)
class Abort:
    epoch: int
    reason: Text


@dataclass(frozen=True, kw_only=True)
class Finish:
    reason: Text
    failed: bool
    paused: bool = False
    """The run has steps left and may be resumed: nodes may wait for that."""
    soon: bool = False
    """It goes on at once, with a setting changed: all nodes come back."""


CoordinatorMessage = (
    Welcome
    | Placement
    | Restore
    | Begin
    | Commit
    | TakeSnapshot
    | Retain
    | SendLayers
    | ShutOut
    | Validate
    | Prefetch
    | Follow
    | FollowStep
    | AskHeartbeat
    | HeartbeatReply
    | Relays
    | RelayFor
    | ProbePeer
    | Abort
    | Finish
    | Refusal
)

Waiting = Begin | Commit | Validate
"""Messages that say how long their node has waited for others."""


def with_wait(message: CoordinatorMessage, seconds: float) -> CoordinatorMessage:
    """The message with the seconds that its node has waited, if it is one that says them."""
    return replace(message, waited_seconds=seconds) if isinstance(message, Waiting) else message
