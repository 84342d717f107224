"""The protobuf form of `messages.py`: what is read from and written to the control stream."""

from enum import IntEnum
from typing import TypeVar

from wire.errors import ProtocolViolationError, RefusalCode
from wire.identity.enrolment import Hardware, Refusal
from wire.messages import (
    Abort,
    Applied,
    Begin,
    Commit,
    CoordinatorMessage,
    DirectionReport,
    FailureKind,
    Finish,
    Heartbeat,
    Hello,
    Leave,
    LinkReport,
    NodeMessage,
    Placed,
    PlacedStage,
    Placement,
    Prefetch,
    Ready,
    Restore,
    StepFailed,
    TakeSnapshot,
    Telemetry,
    Vote,
    Welcome,
)
from wire.spec import Direction
from wire.v1 import control_pb2, enrolment_pb2


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
                    download_rate=message.download_rate,
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
                    peer_stage=message.peer_stage,
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
                download_rate=hello.download_rate,
                epoch=hello.epoch,
                process_nonce=hello.process_nonce,
            )
        case "placed":
            placed = message.placed
            return Placed(epoch=placed.epoch, held_step=placed.held_step, voted=placed.voted)
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
                peer_stage=failed.peer_stage,
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
            missed = None if message.missed is None else control_pb2.Commit(**vars(message.missed))
            return control_pb2.CoordinatorMessage(
                restore=control_pb2.Restore(
                    epoch=message.epoch,
                    step=message.step,
                    missed=missed,
                    uncompressed=message.uncompressed,
                )
            )
        case Begin():
            return control_pb2.CoordinatorMessage(begin=control_pb2.Begin(**vars(message)))
        case Commit():
            return control_pb2.CoordinatorMessage(commit=control_pb2.Commit(**vars(message)))
        case TakeSnapshot():
            return control_pb2.CoordinatorMessage(take_snapshot=control_pb2.TakeSnapshot(**vars(message)))
        case Prefetch():
            return control_pb2.CoordinatorMessage(
                prefetch=control_pb2.Prefetch(step=message.step, units=list(message.units))
            )
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
            restore = message.restore
            missed = _commit_from_proto(restore.missed) if restore.HasField("missed") else None
            return Restore(
                epoch=restore.epoch, step=restore.step, missed=missed, uncompressed=restore.uncompressed
            )
        case "begin":
            return Begin(epoch=message.begin.epoch, step=message.begin.step)
        case "commit":
            return _commit_from_proto(message.commit)
        case "take_snapshot":
            return TakeSnapshot(epoch=message.take_snapshot.epoch, step=message.take_snapshot.step)
        case "prefetch":
            return Prefetch(step=message.prefetch.step, units=tuple(message.prefetch.units))
        case "abort":
            return Abort(epoch=message.abort.epoch, reason=message.abort.reason)
        case "finish":
            return Finish(reason=message.finish.reason, failed=message.finish.failed)
        case "refusal":
            return refusal_from_proto(message.refusal)
        case _:
            raise ProtocolViolationError("the coordinator sent an empty control message")


def _commit_from_proto(message: control_pb2.Commit) -> Commit:
    return Commit(
        epoch=message.epoch, step=message.step, clip_coefficient=message.clip_coefficient, lr=message.lr
    )


def refusal_from_proto(message: enrolment_pb2.Refusal) -> Refusal:
    try:
        code = RefusalCode(message.code)
    except ValueError:
        raise ProtocolViolationError(f"unknown refusal code {message.code!r}") from None
    return Refusal(code=code, message=message.message)
