"""The protobuf form of what nodes send the coordinator (`messages.NodeMessage`).

Parsing rejects values that would harm a reader: numbers out of range, text of more than one line. Whether a
message makes sense in the run is for the state machines to decide.
"""

import math
from collections.abc import Iterable, Mapping

from wire.errors import ProtocolViolationError
from wire.identity.enrolment import Hardware
from wire.identity.names import clean_name
from wire.made import made
from wire.messages import (
    DIGEST_BYTES,
    LONGEST_REASON,
    Applied,
    BlockTime,
    BoundaryEnd,
    FailureKind,
    Following,
    GroupDigests,
    Heartbeat,
    Hello,
    Leave,
    NodeMessage,
    PeerRate,
    Placed,
    Ready,
    RelayTimes,
    StateHashes,
    StepFailed,
    UnitHash,
    Validated,
    Vote,
)
from wire.telemetry import CodecTimes, StepSpans, Telemetry
from wire.telemetry_proto import (
    amount,
    codec_times_from_proto,
    codec_times_to_proto,
    finite,
    line,
    member,
    node_id,
    seconds,
    spans_from_proto,
    spans_to_proto,
    telemetry_from_proto,
    telemetry_to_proto,
)
from wire.v1 import control_pb2, enrolment_pb2

SHA256_BYTES = 32

_Reporting = (
    control_pb2.Vote | control_pb2.Heartbeat | control_pb2.Applied | control_pb2.Ready | control_pb2.Validated
)


def _hardware_to_proto(hardware: Hardware) -> enrolment_pb2.Hardware:
    return enrolment_pb2.Hardware(
        device=hardware.device,
        cores=hardware.cores,
        memory_bytes=hardware.memory_bytes,
        devices=hardware.devices,
        tensor_parallel=hardware.tensor_parallel,
        host_bytes=hardware.host_bytes,
        arithmetic=hardware.arithmetic,
    )


def _hardware_from_proto(message: enrolment_pb2.Hardware) -> Hardware:
    devices, tensor_parallel = message.devices or 1, message.tensor_parallel or 1
    if devices % tensor_parallel:
        raise ProtocolViolationError(f"{devices} devices cannot be rows of {tensor_parallel}")
    return Hardware(
        device=line(message.device),
        cores=message.cores,
        memory_bytes=message.memory_bytes,
        devices=devices,
        tensor_parallel=tensor_parallel,
        host_bytes=message.host_bytes,
        arithmetic=line(message.arithmetic),
    )


def _digests_to_proto(group: int, digests: GroupDigests) -> control_pb2.GroupDigests:
    return control_pb2.GroupDigests(
        group=group,
        gradient=digests.gradient,
        boundaries=[
            control_pb2.BoundaryDigest(
                boundary=at.boundary, backward=at.backward, received=at.received, digest=digest
            )
            for at, digest in sorted(digests.boundaries.items())
        ],
        loss=digests.loss if digests.loss is not None else 0.0,
        has_loss=digests.loss is not None,
    )


def _digests_from_proto(message: control_pb2.GroupDigests) -> GroupDigests:
    boundaries = {
        BoundaryEnd(one.boundary, backward=one.backward, received=one.received): _digest(one.digest)
        for one in message.boundaries
    }
    return GroupDigests(
        gradient=_digest(message.gradient),
        boundaries=boundaries,
        loss=message.loss if message.has_loss else None,
    )


def _hashes_to_proto(message: StateHashes) -> control_pb2.StateHashes:
    return control_pb2.StateHashes(
        epoch=message.epoch,
        step=message.step,
        units=[
            control_pb2.UnitHash(
                unit=unit,
                sha256=bytes.fromhex(one.sha256),
                weights=one.weights,
                moments=one.moments,
                squares=one.squares,
            )
            for unit, one in sorted(message.units.items())
        ],
    )


def _hashes_from_proto(message: control_pb2.StateHashes) -> StateHashes:
    units = {}
    for one in message.units:
        if len(one.sha256) != SHA256_BYTES:
            raise ProtocolViolationError(f"a SHA-256 of {len(one.sha256)} bytes")
        sums = (_squared(one.weights), _squared(one.moments), _squared(one.squares))
        if not all(map(math.isfinite, sums)):
            raise ProtocolViolationError("a layer's norm that is not finite")
        units[one.unit] = UnitHash(one.sha256.hex(), *sums)
    return StateHashes(epoch=message.epoch, step=message.step, units=units)


def _digest(value: bytes) -> bytes:
    if len(value) != DIGEST_BYTES:
        raise ProtocolViolationError(f"a digest of {len(value)} bytes, expected {DIGEST_BYTES}")
    return value


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
                    name=message.name,
                    relay_rate=message.relay_rate,
                    mapped_port=message.mapped_port,
                    also=message.also,
                )
            )
        case Placed():
            return control_pb2.NodeMessage(
                placed=control_pb2.Placed(
                    epoch=message.epoch,
                    held_step=message.held_step,
                    voted=message.voted,
                    lineage=message.lineage,
                    storages=[
                        control_pb2.StorageSeconds(storage=name, seconds=took)
                        for name, took in message.storages.items()
                    ],
                )
            )
        case Ready():
            return control_pb2.NodeMessage(
                ready=control_pb2.Ready(epoch=message.epoch, telemetry=telemetry_to_proto(message.telemetry))
            )
        case Vote():
            return control_pb2.NodeMessage(
                vote=control_pb2.Vote(
                    epoch=message.epoch,
                    step=message.step,
                    norms=norms_to_proto(message.norms),
                    loss=message.loss if message.loss is not None else 0.0,
                    has_loss=message.loss is not None,
                    group_losses=[
                        control_pb2.GroupLoss(group=g, loss=one)
                        for g, one in sorted(message.group_losses.items())
                    ],
                    digests=[_digests_to_proto(g, one) for g, one in sorted(message.digests.items())],
                    telemetry=telemetry_to_proto(message.telemetry),
                )
            )
        case Applied():
            return control_pb2.NodeMessage(
                applied=control_pb2.Applied(
                    epoch=message.epoch,
                    step=message.step,
                    telemetry=telemetry_to_proto(message.telemetry),
                )
            )
        case Validated():
            return control_pb2.NodeMessage(
                validated=control_pb2.Validated(
                    epoch=message.epoch,
                    step=message.step,
                    number=message.number,
                    loss=message.loss if message.loss is not None else 0.0,
                    has_loss=message.loss is not None,
                    telemetry=telemetry_to_proto(message.telemetry),
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
                    peer_replica=message.peer_replica,
                )
            )
        case Heartbeat():
            return control_pb2.NodeMessage(
                heartbeat=control_pb2.Heartbeat(
                    telemetry=telemetry_to_proto(message.telemetry), sent_at=message.sent_at
                )
            )
        case Leave():
            return control_pb2.NodeMessage(leave=control_pb2.Leave(**vars(message)))
        case StepSpans():
            return control_pb2.NodeMessage(step_spans=spans_to_proto(message))
        case Following():
            return control_pb2.NodeMessage(following=control_pb2.Following(**vars(message)))
        case StateHashes():
            return control_pb2.NodeMessage(state_hashes=_hashes_to_proto(message))
        case RelayTimes():
            times = [control_pb2.RelayTime(node_id=n, seconds=s) for n, s in message.times.items()]
            return control_pb2.NodeMessage(relay_times=control_pb2.RelayTimes(times=times))
        case BlockTime():
            return control_pb2.NodeMessage(block_time=control_pb2.BlockTime(seconds=message.seconds))
        case CodecTimes():
            return control_pb2.NodeMessage(codec_times=codec_times_to_proto(message))
        case PeerRate():
            return control_pb2.NodeMessage(peer_rate=control_pb2.PeerRate(**vars(message)))


_NO_REPORT = Telemetry()


def _report(body: _Reporting) -> Telemetry:
    """The report in a message; an empty one where a gateway has taken it out."""
    return telemetry_from_proto(body.telemetry) if body.HasField("telemetry") else _NO_REPORT


def split_report(message: control_pb2.NodeMessage, kind: str) -> tuple[bytes, bytes, Telemetry]:
    """The message without its report, the report's bytes, and what it says. `message` loses it.

    `kind` is one that has a report. Raises `ProtocolViolationError` for a report that no correct node sends.
    """
    body = getattr(message, kind)
    report = telemetry_from_proto(body.telemetry)
    data = body.telemetry.SerializeToString()
    body.ClearField("telemetry")
    return message.SerializeToString(), data, report


def node_message_from_proto(message: control_pb2.NodeMessage) -> NodeMessage:
    """Raises `ProtocolViolationError` for an empty message, an unknown enumeration value, a wrong number."""
    match message.WhichOneof("body"):
        case "hello":
            hello = message.hello
            return Hello(
                version=hello.version,
                protocol=hello.protocol,
                peer_address=hello.peer_address,
                hardware=_hardware_from_proto(hello.hardware),
                flops=amount(hello.flops, "a speed"),
                download_rate=amount(hello.download_rate, "a rate"),
                epoch=hello.epoch,
                process_nonce=hello.process_nonce,
                name=clean_name(hello.name),
                relay_rate=amount(hello.relay_rate, "a rate"),
                mapped_port=hello.mapped_port,
                also=tuple(hello.also),
            )
        case "placed":
            placed = message.placed
            return Placed(
                epoch=placed.epoch,
                held_step=placed.held_step,
                voted=placed.voted,
                lineage=placed.lineage,
                storages={line(one.storage): seconds(one.seconds, "a time") for one in placed.storages},
            )
        case "ready":
            return Ready(epoch=message.ready.epoch, telemetry=_report(message.ready))
        case "vote":
            vote = message.vote
            return made(
                Vote,
                {
                    "epoch": vote.epoch,
                    "step": vote.step,
                    "norms": norms_from_proto(vote.norms),
                    "loss": vote.loss if vote.has_loss else None,
                    "group_losses": {one.group: one.loss for one in vote.group_losses},
                    "digests": {one.group: _digests_from_proto(one) for one in vote.digests},
                    "telemetry": _report(vote),
                },
            )
        case "applied":
            applied = message.applied
            return Applied(epoch=applied.epoch, step=applied.step, telemetry=_report(applied))
        case "validated":
            validated = message.validated
            return Validated(
                epoch=validated.epoch,
                step=validated.step,
                number=validated.number,
                loss=validated.loss if validated.has_loss else None,
                telemetry=_report(validated),
            )
        case "step_failed":
            failed = message.step_failed
            return StepFailed(
                epoch=failed.epoch,
                step=failed.step,
                kind=member(FailureKind, failed.kind),
                message=line(failed.message),
                peer_stage=failed.peer_stage,
                peer_replica=failed.peer_replica,
            )
        case "heartbeat":
            return Heartbeat(
                telemetry=_report(message.heartbeat),
                sent_at=finite(message.heartbeat.sent_at, "a time"),
            )
        case "leave":
            return Leave(reason=line(message.leave.reason)[:LONGEST_REASON], failed=message.leave.failed)
        case "step_spans":
            return spans_from_proto(message.step_spans)
        case "following":
            told = message.following
            return Following(
                snapshot=told.snapshot, step=told.step, failed=line(told.failed)[:LONGEST_REASON]
            )
        case "state_hashes":
            return _hashes_from_proto(message.state_hashes)
        case "relay_times":
            times = message.relay_times.times
            return RelayTimes(times={node_id(t.node_id): seconds(t.seconds, "a round trip") for t in times})
        case "block_time":
            return BlockTime(seconds=seconds(message.block_time.seconds, "a block's time"))
        case "codec_times":
            return codec_times_from_proto(message.codec_times)
        case "peer_rate":
            said = message.peer_rate
            return PeerRate(
                node_id=node_id(said.node_id),
                round_trip=seconds(said.round_trip, "a round trip"),
                up=amount(said.up, "a rate"),
                down=amount(said.down, "a rate"),
            )
        case _:
            raise ProtocolViolationError("a node sent an empty control message")


def norms_to_proto(norms: Mapping[int, float]) -> list[control_pb2.UnitNorm]:
    return [control_pb2.UnitNorm(unit=unit, squared_norm=norm) for unit, norm in sorted(norms.items())]


def norms_from_proto(norms: Iterable[control_pb2.UnitNorm]) -> dict[int, float]:
    return {one.unit: _squared(one.squared_norm) for one in norms}


def _squared(value: float) -> float:
    """A sum of squares: may be infinite or NaN, never negative."""
    if value < 0.0:
        raise ProtocolViolationError(f"a squared norm cannot be {value}")
    return value
