"""What a node and the coordinator say to each other, as plain dataclasses, and their protobuf form.

State machines take and return these; protobuf appears only where a stream is read or written. Every step
number counts from 0; the *state* of step s is what s applied steps have made of the initial weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from wire.errors import ProtocolViolationError, RefusalCode
from wire.identity.enrolment import Hardware, Refusal
from wire.spec import Direction
from wire.v1 import control_pb2, enrolment_pb2


class FailureKind(IntEnum):
    """Why a stage could not finish a step."""

    LINK = 1
    NON_FINITE = 2
    INTERNAL = 3


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """One neighbour's link: everything this program wrote to and read from both sockets, in bytes."""

    peer_stage: int
    bytes_sent: int
    bytes_received: int
    retransmits: int
    rejects: int
    rtt_seconds: float


@dataclass(frozen=True, kw_only=True)
class DirectionReport:
    """Whole frames sent for one kind of tensor, and the elements they carried."""

    direction: Direction
    bytes_sent: int
    elements_sent: int


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """Totals since the process took its first stage; the coordinator takes differences."""

    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by kind; they sum to `wall_seconds`."""
    wall_seconds: float = 0.0
    links: tuple[LinkReport, ...] = ()
    directions: tuple[DirectionReport, ...] = ()
    peak_memory_bytes: int = 0


# ---- node to coordinator


@dataclass(frozen=True, kw_only=True)
class Hello:
    version: str
    protocol: int
    peer_address: str
    hardware: Hardware
    flops: float
    epoch: int
    process_nonce: int


@dataclass(frozen=True, kw_only=True)
class Placed:
    epoch: int
    held_step: int
    """The state this process holds for exactly the layers of its new place, or -1."""


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


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    telemetry: Telemetry


@dataclass(frozen=True, kw_only=True)
class Leave:
    reason: str


NodeMessage = Hello | Placed | Ready | Vote | Applied | StepFailed | Heartbeat | Leave


# ---- coordinator to node


@dataclass(frozen=True, kw_only=True)
class Welcome:
    node_id: str
    config_json: str
    heartbeat_seconds: float


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
class Restore:
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Begin:
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Commit:
    epoch: int
    step: int
    clip_coefficient: float
    lr: float


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


CoordinatorMessage = Welcome | Placement | Restore | Begin | Commit | TakeSnapshot | Abort | Finish | Refusal


# ---- protobuf


def _hardware_to_proto(hardware: Hardware) -> enrolment_pb2.Hardware:
    return enrolment_pb2.Hardware(
        device=hardware.device, cores=hardware.cores, memory_bytes=hardware.memory_bytes
    )


def _hardware_from_proto(message: enrolment_pb2.Hardware) -> Hardware:
    return Hardware(device=message.device, cores=message.cores, memory_bytes=message.memory_bytes)


def _telemetry_to_proto(telemetry: Telemetry) -> control_pb2.Telemetry:
    return control_pb2.Telemetry(
        times=[control_pb2.KindSeconds(kind=k, seconds=s) for k, s in telemetry.times.items()],
        wall_seconds=telemetry.wall_seconds,
        links=[control_pb2.LinkReport(**vars(link)) for link in telemetry.links],
        directions=[
            control_pb2.DirectionReport(
                direction=int(d.direction), bytes_sent=d.bytes_sent, elements_sent=d.elements_sent
            )
            for d in telemetry.directions
        ],
        peak_memory_bytes=telemetry.peak_memory_bytes,
    )


def _telemetry_from_proto(message: control_pb2.Telemetry) -> Telemetry:
    return Telemetry(
        times={entry.kind: entry.seconds for entry in message.times},
        wall_seconds=message.wall_seconds,
        links=tuple(
            LinkReport(
                peer_stage=link.peer_stage,
                bytes_sent=link.bytes_sent,
                bytes_received=link.bytes_received,
                retransmits=link.retransmits,
                rejects=link.rejects,
                rtt_seconds=link.rtt_seconds,
            )
            for link in message.links
        ),
        directions=tuple(
            DirectionReport(
                direction=_enum(Direction, d.direction),
                bytes_sent=d.bytes_sent,
                elements_sent=d.elements_sent,
            )
            for d in message.directions
        ),
        peak_memory_bytes=message.peak_memory_bytes,
    )


EnumT = TypeVar("EnumT", bound=IntEnum)


def _enum(kind: type[EnumT], value: int) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        raise ProtocolViolationError(f"{kind.__name__} has no value {value}") from None


def node_message_to_proto(message: NodeMessage) -> control_pb2.NodeMessage:
    match message:
        case Hello():
            return control_pb2.NodeMessage(
                hello=control_pb2.Hello(
                    version=message.version,
                    protocol=message.protocol,
                    peer_address=message.peer_address,
                    hardware=_hardware_to_proto(message.hardware),
                    flops=message.flops,
                    epoch=message.epoch,
                    process_nonce=message.process_nonce,
                )
            )
        case Placed():
            return control_pb2.NodeMessage(placed=control_pb2.Placed(**vars(message)))
        case Ready():
            return control_pb2.NodeMessage(
                ready=control_pb2.Ready(epoch=message.epoch, telemetry=_telemetry_to_proto(message.telemetry))
            )
        case Vote():
            return control_pb2.NodeMessage(
                vote=control_pb2.Vote(
                    epoch=message.epoch,
                    step=message.step,
                    norms=[
                        control_pb2.UnitNorm(unit=u, squared_norm=n) for u, n in sorted(message.norms.items())
                    ],
                    loss=message.loss if message.loss is not None else 0.0,
                    has_loss=message.loss is not None,
                )
            )
        case Applied():
            return control_pb2.NodeMessage(
                applied=control_pb2.Applied(
                    epoch=message.epoch,
                    step=message.step,
                    telemetry=_telemetry_to_proto(message.telemetry),
                )
            )
        case StepFailed():
            return control_pb2.NodeMessage(
                step_failed=control_pb2.StepFailed(
                    epoch=message.epoch,
                    step=message.step,
                    kind=control_pb2.FailureKind.Name(message.kind),
                    message=message.message,
                )
            )
        case Heartbeat():
            return control_pb2.NodeMessage(
                heartbeat=control_pb2.Heartbeat(telemetry=_telemetry_to_proto(message.telemetry))
            )
        case Leave():
            return control_pb2.NodeMessage(leave=control_pb2.Leave(reason=message.reason))


def node_message_from_proto(message: control_pb2.NodeMessage) -> NodeMessage:
    """Raises `ProtocolViolationError` for an empty message or an unknown enumeration value."""
    match message.WhichOneof("body"):
        case "hello":
            hello = message.hello
            return Hello(
                version=hello.version,
                protocol=hello.protocol,
                peer_address=hello.peer_address,
                hardware=_hardware_from_proto(hello.hardware),
                flops=hello.flops,
                epoch=hello.epoch,
                process_nonce=hello.process_nonce,
            )
        case "placed":
            return Placed(epoch=message.placed.epoch, held_step=message.placed.held_step)
        case "ready":
            return Ready(epoch=message.ready.epoch, telemetry=_telemetry_from_proto(message.ready.telemetry))
        case "vote":
            vote = message.vote
            return Vote(
                epoch=vote.epoch,
                step=vote.step,
                norms={n.unit: n.squared_norm for n in vote.norms},
                loss=vote.loss if vote.has_loss else None,
            )
        case "applied":
            applied = message.applied
            return Applied(
                epoch=applied.epoch, step=applied.step, telemetry=_telemetry_from_proto(applied.telemetry)
            )
        case "step_failed":
            failed = message.step_failed
            return StepFailed(
                epoch=failed.epoch,
                step=failed.step,
                kind=_enum(FailureKind, failed.kind),
                message=failed.message,
            )
        case "heartbeat":
            return Heartbeat(telemetry=_telemetry_from_proto(message.heartbeat.telemetry))
        case "leave":
            return Leave(reason=message.leave.reason)
        case _:
            raise ProtocolViolationError("a node sent an empty control message")


def coordinator_message_to_proto(message: CoordinatorMessage) -> control_pb2.CoordinatorMessage:
    match message:
        case Welcome():
            return control_pb2.CoordinatorMessage(welcome=control_pb2.Welcome(**vars(message)))
        case Placement():
            return control_pb2.CoordinatorMessage(
                placement=control_pb2.Placement(
                    epoch=message.epoch,
                    stage=message.stage,
                    stages=[control_pb2.PlacedStage(**vars(stage)) for stage in message.stages],
                )
            )
        case Restore():
            return control_pb2.CoordinatorMessage(restore=control_pb2.Restore(**vars(message)))
        case Begin():
            return control_pb2.CoordinatorMessage(begin=control_pb2.Begin(**vars(message)))
        case Commit():
            return control_pb2.CoordinatorMessage(commit=control_pb2.Commit(**vars(message)))
        case TakeSnapshot():
            return control_pb2.CoordinatorMessage(take_snapshot=control_pb2.TakeSnapshot(**vars(message)))
        case Abort():
            return control_pb2.CoordinatorMessage(abort=control_pb2.Abort(**vars(message)))
        case Finish():
            return control_pb2.CoordinatorMessage(finish=control_pb2.Finish(**vars(message)))
        case Refusal():
            return control_pb2.CoordinatorMessage(
                refusal=enrolment_pb2.Refusal(code=message.code.value, message=message.message)
            )


def coordinator_message_from_proto(message: control_pb2.CoordinatorMessage) -> CoordinatorMessage:
    """Raises `ProtocolViolationError` for an empty message or an unknown refusal code."""
    match message.WhichOneof("body"):
        case "welcome":
            welcome = message.welcome
            return Welcome(
                node_id=welcome.node_id,
                config_json=welcome.config_json,
                heartbeat_seconds=welcome.heartbeat_seconds,
            )
        case "placement":
            return Placement(
                epoch=message.placement.epoch,
                stage=message.placement.stage,
                stages=tuple(
                    PlacedStage(node_id=stage.node_id, address=stage.address)
                    for stage in message.placement.stages
                ),
            )
        case "restore":
            return Restore(epoch=message.restore.epoch, step=message.restore.step)
        case "begin":
            return Begin(epoch=message.begin.epoch, step=message.begin.step)
        case "commit":
            commit = message.commit
            return Commit(
                epoch=commit.epoch,
                step=commit.step,
                clip_coefficient=commit.clip_coefficient,
                lr=commit.lr,
            )
        case "take_snapshot":
            return TakeSnapshot(epoch=message.take_snapshot.epoch, step=message.take_snapshot.step)
        case "abort":
            return Abort(epoch=message.abort.epoch, reason=message.abort.reason)
        case "finish":
            return Finish(reason=message.finish.reason, failed=message.finish.failed)
        case "refusal":
            return refusal_from_proto(message.refusal)
        case _:
            raise ProtocolViolationError("the coordinator sent an empty control message")


def refusal_from_proto(message: enrolment_pb2.Refusal) -> Refusal:
    try:
        code = RefusalCode(message.code)
    except ValueError:
        raise ProtocolViolationError(f"unknown refusal code {message.code!r}") from None
    return Refusal(code=code, message=message.message)
