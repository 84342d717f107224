"""The protobuf form of `messages.py`.

Parsing rejects values that would harm a reader: numbers out of range, text of more than one line. Whether a
message makes sense in the run is for the state machines to decide.
"""

import math
from collections.abc import Iterable, Mapping

from wire.errors import ProtocolViolationError, RefusalCode
from wire.identity.enrolment import Hardware, Refusal
from wire.identity.names import clean_name
from wire.messages import (
    DIGEST_BYTES,
    LONGEST_REASON,
    Abort,
    Applied,
    Begin,
    BlockTime,
    BoundaryEnd,
    Commit,
    CoordinatorMessage,
    FailureKind,
    Finish,
    Follow,
    Following,
    FollowStep,
    GroupDigests,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Leave,
    NodeMessage,
    PeerRate,
    Placed,
    PlacedRow,
    PlacedStage,
    Placement,
    Prefetch,
    ProbePeer,
    Ready,
    RelayFor,
    Relays,
    RelayTimes,
    Restore,
    Retain,
    SendLayers,
    ShutOut,
    StepFailed,
    TakeSnapshot,
    Validate,
    Validated,
    Vote,
    Welcome,
)
from wire.telemetry import CodecTimes, StepSpans
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


def _digest(value: bytes) -> bytes:
    if len(value) != DIGEST_BYTES:
        raise ProtocolViolationError(f"a digest of {len(value)} bytes, expected {DIGEST_BYTES}")
    return value


def _squared(value: float) -> float:
    """A sum of squares: may be infinite or NaN, never negative."""
    if value < 0.0:
        raise ProtocolViolationError(f"a squared norm cannot be {value}")
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
            return control_pb2.NodeMessage(placed=control_pb2.Placed(**vars(message)))
        case Ready():
            return control_pb2.NodeMessage(
                ready=control_pb2.Ready(epoch=message.epoch, telemetry=telemetry_to_proto(message.telemetry))
            )
        case Vote():
            return control_pb2.NodeMessage(
                vote=control_pb2.Vote(
                    epoch=message.epoch,
                    step=message.step,
                    norms=_norms_to_proto(message.norms),
                    loss=message.loss if message.loss is not None else 0.0,
                    has_loss=message.loss is not None,
                    group_losses=[
                        control_pb2.GroupLoss(group=g, loss=one)
                        for g, one in sorted(message.group_losses.items())
                    ],
                    digests=[_digests_to_proto(g, one) for g, one in sorted(message.digests.items())],
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
        case RelayTimes():
            times = [control_pb2.RelayTime(node_id=n, seconds=s) for n, s in message.times.items()]
            return control_pb2.NodeMessage(relay_times=control_pb2.RelayTimes(times=times))
        case BlockTime():
            return control_pb2.NodeMessage(block_time=control_pb2.BlockTime(seconds=message.seconds))
        case CodecTimes():
            return control_pb2.NodeMessage(codec_times=codec_times_to_proto(message))
        case PeerRate():
            return control_pb2.NodeMessage(peer_rate=control_pb2.PeerRate(**vars(message)))


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
                epoch=placed.epoch, held_step=placed.held_step, voted=placed.voted, lineage=placed.lineage
            )
        case "ready":
            return Ready(epoch=message.ready.epoch, telemetry=telemetry_from_proto(message.ready.telemetry))
        case "vote":
            vote = message.vote
            return Vote(
                epoch=vote.epoch,
                step=vote.step,
                norms=_norms_from_proto(vote.norms),
                loss=vote.loss if vote.has_loss else None,
                group_losses={one.group: one.loss for one in vote.group_losses},
                digests={one.group: _digests_from_proto(one) for one in vote.digests},
            )
        case "applied":
            applied = message.applied
            return Applied(
                epoch=applied.epoch, step=applied.step, telemetry=telemetry_from_proto(applied.telemetry)
            )
        case "validated":
            validated = message.validated
            return Validated(
                epoch=validated.epoch,
                step=validated.step,
                number=validated.number,
                loss=validated.loss if validated.has_loss else None,
                telemetry=telemetry_from_proto(validated.telemetry),
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
                telemetry=telemetry_from_proto(message.heartbeat.telemetry),
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


def coordinator_message_to_proto(message: CoordinatorMessage) -> control_pb2.CoordinatorMessage:
    match message:
        case Welcome():
            return control_pb2.CoordinatorMessage(welcome=control_pb2.Welcome(**vars(message)))
        case Placement():
            rows = _rows_to_proto(message.rows)
            at = next((at for at, row in enumerate(message.rows) if row.stages is message.stages), None)
            own = None if at is None else rows[at].stages
            return control_pb2.CoordinatorMessage(
                placement=control_pb2.Placement(
                    epoch=message.epoch,
                    stage=message.stage,
                    stages=own if own is not None else _stages_to_proto(message.stages),
                    replica=message.replica,
                    rows=rows,
                    relays=[
                        control_pb2.PeerRelays(node_id=peer, relays=_stages_to_proto(relays))
                        for peer, relays in message.relays.items()
                    ],
                    also=[
                        control_pb2.PeerAddresses(node_id=peer, addresses=addresses)
                        for peer, addresses in message.also.items()
                    ],
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
                    lineage=message.lineage,
                    activation_codecs=message.activation_codecs,
                    gradient_codecs=message.gradient_codecs,
                    storages=message.storages,
                )
            )
        case Begin():
            return control_pb2.CoordinatorMessage(begin=control_pb2.Begin(**vars(message)))
        case Commit():
            return control_pb2.CoordinatorMessage(commit=control_pb2.Commit(**vars(message)))
        case TakeSnapshot():
            return control_pb2.CoordinatorMessage(take_snapshot=control_pb2.TakeSnapshot(**vars(message)))
        case Validate():
            return control_pb2.CoordinatorMessage(validate=control_pb2.Validate(**vars(message)))
        case Prefetch():
            return control_pb2.CoordinatorMessage(
                prefetch=control_pb2.Prefetch(step=message.step, units=list(message.units), keep=message.keep)
            )
        case Follow():
            return control_pb2.CoordinatorMessage(
                follow=control_pb2.Follow(
                    step=message.step,
                    stage=message.stage,
                    stages=message.stages,
                    lineage=message.lineage,
                    sources=_stages_to_proto(message.sources),
                )
            )
        case FollowStep():
            return control_pb2.CoordinatorMessage(
                follow_step=control_pb2.FollowStep(
                    snapshot=message.snapshot,
                    step=message.step,
                    clip_coefficient=message.clip_coefficient,
                    lr=message.lr,
                    norms=_norms_to_proto(message.norms),
                )
            )
        case ShutOut():
            return control_pb2.CoordinatorMessage(shut_out=control_pb2.ShutOut(node_ids=message.node_ids))
        case Retain():
            return control_pb2.CoordinatorMessage(
                retain=control_pb2.Retain(steps=message.steps, record=message.record)
            )
        case SendLayers():
            return control_pb2.CoordinatorMessage(
                send_layers=control_pb2.SendLayers(step=message.step, units=message.units)
            )
        case HeartbeatReply():
            return control_pb2.CoordinatorMessage(heartbeat_reply=control_pb2.HeartbeatReply(**vars(message)))
        case Relays():
            return control_pb2.CoordinatorMessage(
                relays=control_pb2.Relays(relays=_stages_to_proto(message.relays))
            )
        case RelayFor():
            return control_pb2.CoordinatorMessage(relay_for=control_pb2.RelayFor(nodes=message.nodes))
        case ProbePeer():
            peer = control_pb2.PlacedStage(**vars(message.peer))
            return control_pb2.CoordinatorMessage(probe_peer=control_pb2.ProbePeer(peer=peer))
        case Abort():
            return control_pb2.CoordinatorMessage(abort=control_pb2.Abort(**vars(message)))
        case Finish():
            return control_pb2.CoordinatorMessage(finish=control_pb2.Finish(**vars(message)))
        case Refusal():
            return control_pb2.CoordinatorMessage(
                refusal=enrolment_pb2.Refusal(code=message.code.value, message=message.message)
            )


def coordinator_message_from_proto(message: control_pb2.CoordinatorMessage) -> CoordinatorMessage:
    """Raises `ProtocolViolationError` for an empty message, an unknown refusal code or a wrong number."""
    match message.WhichOneof("body"):
        case "welcome":
            welcome = message.welcome
            if not 0.0 < welcome.heartbeat_seconds < math.inf:
                raise ProtocolViolationError(f"no heartbeat can come every {welcome.heartbeat_seconds} s")
            return Welcome(
                node_id=welcome.node_id,
                config_json=welcome.config_json,
                heartbeat_seconds=welcome.heartbeat_seconds,
                windows=welcome.windows,
            )
        case "placement":
            return _placement_from_proto(message.placement)
        case "restore":
            restore = message.restore
            missed = _commit_from_proto(restore.missed) if restore.HasField("missed") else None
            return Restore(
                epoch=restore.epoch,
                step=restore.step,
                missed=missed,
                uncompressed=restore.uncompressed,
                lineage=restore.lineage,
                activation_codecs=tuple(restore.activation_codecs),
                gradient_codecs=tuple(restore.gradient_codecs),
                storages=tuple(restore.storages),
            )
        case "begin":
            begin = message.begin
            return Begin(
                epoch=begin.epoch,
                step=begin.step,
                link_windows=tuple(begin.link_windows),
                keep_sums=begin.keep_sums,
                audited=tuple(begin.audited),
                waited_seconds=amount(begin.waited_seconds, "a wait"),
                loss_scale=amount(begin.loss_scale, "a loss scale"),
            )
        case "commit":
            return _commit_from_proto(message.commit)
        case "take_snapshot":
            take = message.take_snapshot
            return TakeSnapshot(epoch=take.epoch, step=take.step, place=line(take.place))
        case "validate":
            command = message.validate
            return Validate(
                epoch=command.epoch,
                step=command.step,
                number=command.number,
                microbatches=command.microbatches,
                waited_seconds=amount(command.waited_seconds, "a wait"),
            )
        case "prefetch":
            wanted = message.prefetch
            return Prefetch(step=wanted.step, units=tuple(wanted.units), keep=wanted.keep)
        case "follow":
            follow = message.follow
            if follow.sources and follow.stage >= follow.stages:
                raise ProtocolViolationError(f"stage {follow.stage} is not one of {follow.stages}")
            return Follow(
                step=follow.step,
                stage=follow.stage,
                stages=follow.stages,
                lineage=follow.lineage,
                sources=_stages_from_proto(follow.sources),
            )
        case "follow_step":
            after = message.follow_step
            return FollowStep(
                snapshot=after.snapshot,
                step=after.step,
                clip_coefficient=amount(after.clip_coefficient, "a clip coefficient"),
                lr=amount(after.lr, "a learning rate"),
                norms=_norms_from_proto(after.norms),
            )
        case "shut_out":
            return ShutOut(node_ids=tuple(line(one) for one in message.shut_out.node_ids))
        case "retain":
            return Retain(steps=tuple(message.retain.steps), record=message.retain.record)
        case "send_layers":
            return SendLayers(step=message.send_layers.step, units=tuple(message.send_layers.units))
        case "heartbeat_reply":
            reply = message.heartbeat_reply
            return HeartbeatReply(sent_at=finite(reply.sent_at, "a time"), at=finite(reply.at, "a time"))
        case "relays":
            return Relays(relays=_stages_from_proto(message.relays.relays))
        case "relay_for":
            return RelayFor(nodes=tuple(message.relay_for.nodes))
        case "probe_peer":
            (peer,) = _stages_from_proto([message.probe_peer.peer])
            return ProbePeer(peer=peer)
        case "abort":
            return Abort(epoch=message.abort.epoch, reason=line(message.abort.reason))
        case "finish":
            found = message.finish
            return Finish(
                reason=line(found.reason), failed=found.failed, paused=found.paused, soon=found.soon
            )
        case "refusal":
            return refusal_from_proto(message.refusal)
        case _:
            raise ProtocolViolationError("the coordinator sent an empty control message")


def _norms_to_proto(norms: Mapping[int, float]) -> list[control_pb2.UnitNorm]:
    return [control_pb2.UnitNorm(unit=unit, squared_norm=norm) for unit, norm in sorted(norms.items())]


def _norms_from_proto(norms: Iterable[control_pb2.UnitNorm]) -> dict[int, float]:
    return {one.unit: _squared(one.squared_norm) for one in norms}


def _stages_to_proto(stages: tuple[PlacedStage, ...]) -> list[control_pb2.PlacedStage]:
    return [control_pb2.PlacedStage(**vars(stage)) for stage in stages]


_newest_rows: tuple[tuple[PlacedRow, ...], list[control_pb2.PlacedRow]] = ((), [])


def _rows_to_proto(rows: tuple[PlacedRow, ...]) -> list[control_pb2.PlacedRow]:
    """The newest are kept: a placement sends the same rows to each of a thousand nodes."""
    global _newest_rows
    if rows is not _newest_rows[0]:
        made = [control_pb2.PlacedRow(stages=_stages_to_proto(row.stages), groups=row.groups) for row in rows]
        _newest_rows = rows, made
    return _newest_rows[1]


def _stages_from_proto(stages: Iterable[control_pb2.PlacedStage]) -> tuple[PlacedStage, ...]:
    return tuple(PlacedStage(node_id=stage.node_id, address=stage.address) for stage in stages)


def _placement_from_proto(message: control_pb2.Placement) -> Placement:
    if message.stage >= len(message.stages):
        raise ProtocolViolationError(f"stage {message.stage} is not one of {len(message.stages)}")
    if message.replica >= max(1, len(message.rows)):
        raise ProtocolViolationError(f"row {message.replica} is not one of {max(1, len(message.rows))}")
    for row in message.rows:
        if len(row.stages) != len(message.stages):
            raise ProtocolViolationError(
                f"a row has {len(row.stages)} stages, and the node's own {len(message.stages)}"
            )
    return Placement(
        epoch=message.epoch,
        stage=message.stage,
        stages=_stages_from_proto(message.stages),
        replica=message.replica,
        rows=tuple(
            PlacedRow(stages=_stages_from_proto(row.stages), groups=tuple(row.groups)) for row in message.rows
        ),
        relays={one.node_id: _stages_from_proto(one.relays) for one in message.relays},
        also={one.node_id: tuple(one.addresses) for one in message.also},
    )


def _commit_from_proto(message: control_pb2.Commit) -> Commit:
    return Commit(
        epoch=message.epoch,
        step=message.step,
        clip_coefficient=amount(message.clip_coefficient, "a clip coefficient"),
        lr=amount(message.lr, "a learning rate"),
        waited_seconds=amount(message.waited_seconds, "a wait"),
    )


def refusal_from_proto(message: enrolment_pb2.Refusal) -> Refusal:
    try:
        code = RefusalCode(message.code)
    except ValueError:
        raise ProtocolViolationError(f"unknown refusal code {message.code[:40]!r}") from None
    return Refusal(code=code, message=line(message.message))
