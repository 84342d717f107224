"""The actions that the run's state machine returns and the coordinator executes.

They are executed in order. A record is durable before the next action starts, so a commit is on disk before
any stage learns of it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from node.run_state.grid import ONE_ROW, Groups
from node.telemetry.events import LEFT
from node.tuning.codec_plan import CodecPlan
from node.tuning.storage_choice import StoragePlan
from wire.errors import without_folders
from wire.messages import Abort, Begin, Commit, CoordinatorMessage, Finish, Portion, UnitHash


@dataclass(frozen=True, kw_only=True)
class Send:
    """Queue a control message for a node. A node that reconnects is sent what it missed."""

    node_id: str
    message: CoordinatorMessage


@dataclass(frozen=True, kw_only=True)
class Decide:
    """Stages can be assigned now. Make the decisions that depend on the present nodes, such as the run's
    precision, and continue with them."""


@dataclass(frozen=True, kw_only=True)
class RecordPlacement:
    """Record a new epoch with these nodes, by stage, and row after row if there are several."""

    epoch: int
    nodes: tuple[str, ...]
    addresses: tuple[str, ...]
    groups: Groups = ONE_ROW
    """The gradient groups of each row."""


@dataclass(frozen=True, kw_only=True)
class RecordRestored:
    """Record that every stage of the epoch holds the state of `step`, and that its links are warm."""

    epoch: int
    step: int
    nodes: tuple[str, ...]
    groups: Groups = ONE_ROW


@dataclass(frozen=True, kw_only=True)
class RecordPlan:
    """From `step` until the next record of this kind, links use these codecs, or stages store their
    activations like this."""

    step: int
    plan: CodecPlan | StoragePlan


@dataclass(frozen=True, kw_only=True)
class RecordCommit:
    """Step `step` is committed: gradients are clipped by `clip_coefficient` and applied at rate `lr`."""

    epoch: int
    step: int
    loss: float
    """NaN if no token of the step counts as a label."""
    grad_norm: float
    lr: float
    clip_coefficient: float
    norms: Mapping[int, float]
    """Squared gradient norms by layer unit."""


@dataclass(frozen=True, kw_only=True)
class RecordHeldOut:
    """The held-out loss of the state of `step`, in nats per token."""

    step: int
    loss: float | None
    """The loss with the run's codecs on the links; None if the codecs only support training samples."""
    uncompressed: float
    """The loss with fp32 on every link; NaN if no token counts as a label."""
    samples: int
    best: bool = False
    """Whether it is the least uncompressed loss so far."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """All stages have applied `step`, or begin the next step as soon as they have."""

    epoch: int
    step: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OpenSnapshot:
    """Nodes will upload the state of `step`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class SnapshotAgreed:
    """The layers of this snapshot are only valid with these hashes."""

    step: int
    units: Mapping[int, UnitHash]
    """Hashes by layer unit."""
    alone: Collection[int]
    """Units that only one node holds. Their files are also compared with that node's report."""


@dataclass(frozen=True, kw_only=True)
class SnapshotDropped:
    """No snapshot of this step is taken. Layers that are uploaded for it are not stored."""

    step: int


@dataclass(frozen=True, kw_only=True)
class RefuseSnapshot:
    """A complete snapshot is not the run's state. Stop using it, then call `snapshot_damaged`."""

    step: int
    reason: str


class AbortKind(StrEnum):
    """Why an epoch ended before its step."""

    LOST = "lost"
    """A node that hosted a stage is gone."""
    FAILED = "failed"
    """A stage could not do its work."""
    NOT_FINITE = "not-finite"
    """A value was not finite."""
    DIFFERS = "differs"
    """Rows computed different gradients."""
    PLACEMENT = "placement"
    """The stages move to other nodes, or to more nodes."""


@dataclass(frozen=True, kw_only=True)
class Aborted:
    """The epoch ended before its step. The next epoch runs the step again."""

    epoch: int
    step: int
    kind: AbortKind
    reason: str


@dataclass(frozen=True, kw_only=True)
class SeatLost:
    """A host is gone, and its epoch continues. During a step, other rows take over the work of its row."""

    epoch: int
    step: int
    node_id: str
    row: int
    stage: int
    reason: str
    groups: tuple[int, ...]
    """The gradient groups of its row in the running step, and what other rows lose with it; empty between two
    steps."""
    portions: tuple[Portion, ...] = ()
    """The groups that each row computes from now on."""


@dataclass(frozen=True, kw_only=True)
class SeatOffered:
    """A node and its neighbours will open the links of an empty seat."""

    nodes: tuple[str, ...]
    """The node that has or will have each seat, row after row; "" for an empty seat."""
    addresses: tuple[str, ...]
    rows: int


@dataclass(frozen=True, kw_only=True)
class SeatFilled:
    """A node that followed the run has taken an empty seat of the epoch, from `step` on."""

    epoch: int
    step: int
    node_id: str
    row: int
    stage: int
    nodes: tuple[str, ...]
    """The node in each seat, row after row; "" for an empty seat."""
    addresses: tuple[str, ...]
    rows: int


@dataclass(frozen=True, kw_only=True)
class Released:
    """The node has left the run: close its session after sending `Finish`."""

    node_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Announce:
    """A line for the operator."""

    text: str
    about: str = ""
    """The node that lost its stage for this reason, is shut out, or stays only because no other node can take
    its stage."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The run is over, and all sessions close. `failed`: whether it ended before its time."""

    reason: str
    failed: bool


Action = (
    Send
    | Decide
    | RecordPlacement
    | RecordRestored
    | RecordPlan
    | RecordCommit
    | RecordHeldOut
    | StepDone
    | OpenSnapshot
    | SnapshotAgreed
    | SnapshotDropped
    | RefuseSnapshot
    | Aborted
    | SeatLost
    | SeatOffered
    | SeatFilled
    | Released
    | Announce
    | Stop
)


def epoch_over(nodes: Iterable[str], epoch: int, reason: str) -> list[Action]:
    """The nodes wait for a stage again."""
    return [Send(node_id=node, message=Abort(epoch=epoch, reason=reason)) for node in nodes]


def run_over(nodes: Iterable[str], reason: str, *, failed: bool) -> list[Action]:
    """The nodes end."""
    return finish_all(nodes, Finish(reason=reason, failed=failed))


def finish_all(nodes: Iterable[str], finish: Finish) -> list[Action]:
    """Send every node this `Finish`."""
    return [Send(node_id=node, message=finish) for node in nodes]


def goodbye(reason: str, *, failed: bool, done: bool, soon: bool = False) -> Finish:
    """The last message of a run. If steps are left, nodes wait for it to resume as long as their owners
    allow.

    Nodes that do not wait end with an error even if the run was only stopped. Then a supervisor (systemd, a
    Job) restarts them, and they are there when the run resumes.
    """
    reason = without_folders(reason)
    if done:
        return Finish(reason=reason, failed=failed)
    if failed:
        return Finish(reason=reason, failed=True, paused=True)
    if soon:
        return Finish(reason=reason, failed=True, paused=True, soon=True)
    left = "the run was stopped before its last step; the same join line works again once it is resumed"
    return Finish(reason=f"{reason}: {left}", failed=True, paused=True)


def sent_away(node_id: str, reason: str) -> list[Action]:
    """The run cannot use this node."""
    return [*run_over([node_id], reason, failed=True), Released(node_id=node_id, reason=reason)]


def let_go(node_id: str) -> list[Action]:
    """The node asked to leave."""
    return [
        *run_over([node_id], "you have left the run", failed=False),
        Released(node_id=node_id, reason=LEFT),
    ]


def without_old_work(actions: Sequence[Action]) -> Sequence[Action]:
    """Leave out each `Begin`, alone or with a commit, that a later one to the same node replaces: after a
    death work may be shared several times at once."""
    told: set[str] = set()
    kept: list[Action] = []
    for action in reversed(actions):
        if isinstance(action, Send) and (
            isinstance(action.message, Begin)
            or (isinstance(action.message, Commit) and action.message.then is not None)
        ):
            if action.node_id in told:
                continue
            told.add(action.node_id)
        kept.append(action)
    return actions if len(kept) == len(actions) else kept[::-1]


def costs_last(actions: Sequence[Action]) -> Sequence[Action]:
    """Put the begin of the next step first, so that nodes compute while the costs of this step are summed."""
    if not actions:  # the case for nearly every vote
        return actions
    at = next((at for at, action in enumerate(actions) if isinstance(action, StepDone)), None)
    if at is None or not all(isinstance(action, Send) for action in actions[at + 1 :]):
        return actions
    return [*actions[:at], *actions[at + 1 :], actions[at]]
