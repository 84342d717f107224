"""The protobuf form of what the coordinator sends nodes (`messages.CoordinatorMessage`).

Parsing rejects values that would harm a reader, as `node_messages_proto` does.
"""

import math
from collections.abc import Iterable

from wire.errors import ProtocolViolationError, RefusalCode
from wire.identity.enrolment import Refusal
from wire.messages import (
    Abort,
    Begin,
    Commit,
    CoordinatorMessage,
    Finish,
    Follow,
    FollowStep,
    HeartbeatReply,
    PlacedRow,
    PlacedStage,
    Placement,
    Prefetch,
    ProbePeer,
    RelayFor,
    Relays,
    Restore,
    Retain,
    SendLayers,
    ShutOut,
    TakeSnapshot,
    Validate,
    Waiting,
    Welcome,
)
from wire.node_messages_proto import norms_from_proto, norms_to_proto
from wire.telemetry_proto import (
    amount,
    finite,
    line,
)
from wire.v1 import control_pb2, enrolment_pb2


def coordinator_message_to_proto(message: CoordinatorMessage) -> control_pb2.CoordinatorMessage:
    match message:
        case Welcome():
            return control_pb2.CoordinatorMessage(welcome=control_pb2.Welcome(**vars(message)))
        case Placement():
            return control_pb2.CoordinatorMessage(
                placement=control_pb2.Placement(
                    epoch=message.epoch,
                    stage=message.stage,
                    stages=_row_to_proto(message.stages),
                    replica=message.replica,
                    rows=[
                        control_pb2.PlacedRow(
                            node=control_pb2.PlacedStage(**vars(row.node)), groups=row.groups
                        )
                        for row in message.rows
                    ],
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
            missed = None if message.missed is None else _commit_to_proto(message.missed)
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
            return control_pb2.CoordinatorMessage(commit=_commit_to_proto(message))
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
                    norms=norms_to_proto(message.norms),
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


_newest_packed: tuple[CoordinatorMessage | None, bytes] = (None, b"")


def packed(message: CoordinatorMessage) -> bytes:
    """The message as bytes. The newest is kept: a step has the same for many nodes."""
    global _newest_packed
    kept, data = _newest_packed
    if message is not kept and message != kept:
        data = coordinator_message_to_proto(message).SerializeToString()
        _newest_packed = message, data
    return data


def wait_head(message: Waiting) -> bytes:
    """What stands before the eight bytes of the seconds that a node has waited. Both together, after
    `packed(message)`, are the message that says them: parts of one field are merged when they are read."""
    return _WAIT_HEADS[type(message)]


_WAIT_HEADS = {
    kind: whole.SerializeToString()[:-8]
    for kind, whole in (
        (Begin, control_pb2.CoordinatorMessage(begin=control_pb2.Begin(waited_seconds=1.0))),
        (Commit, control_pb2.CoordinatorMessage(commit=control_pb2.Commit(waited_seconds=1.0))),
        (Validate, control_pb2.CoordinatorMessage(validate=control_pb2.Validate(waited_seconds=1.0))),
    )
}


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
            return _begin_from_proto(message.begin)
        case "commit":
            return _commit_from_proto(message.commit)
        case "take_snapshot":
            take = message.take_snapshot
            return TakeSnapshot(
                epoch=take.epoch, step=take.step, place=line(take.place), only_hashes=take.only_hashes
            )
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
                norms=norms_from_proto(after.norms),
            )
        case "shut_out":
            return ShutOut(node_ids=tuple(line(one) for one in message.shut_out.node_ids))
        case "retain":
            return Retain(steps=tuple(message.retain.steps), record=message.retain.record)
        case "send_layers":
            return SendLayers(step=message.send_layers.step, units=tuple(message.send_layers.units))
        case "heartbeat_reply":
            reply = message.heartbeat_reply
            return HeartbeatReply(
                sent_at=finite(reply.sent_at, "a time"),
                at=finite(reply.at, "a time"),
                pause=amount(reply.pause, "a pause"),
            )
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


def _stages_to_proto(stages: tuple[PlacedStage, ...]) -> list[control_pb2.PlacedStage]:
    return [control_pb2.PlacedStage(**vars(stage)) for stage in stages]


_newest_row: tuple[tuple[PlacedStage, ...], list[control_pb2.PlacedStage]] = ((), [])


def _row_to_proto(stages: tuple[PlacedStage, ...]) -> list[control_pb2.PlacedStage]:
    """The newest is kept: placements send the same row to each of its nodes."""
    global _newest_row
    if stages is not _newest_row[0]:
        _newest_row = stages, _stages_to_proto(stages)
    return _newest_row[1]


def _stages_from_proto(stages: Iterable[control_pb2.PlacedStage]) -> tuple[PlacedStage, ...]:
    return tuple(PlacedStage(node_id=stage.node_id, address=stage.address) for stage in stages)


def _placement_from_proto(message: control_pb2.Placement) -> Placement:
    if message.stage >= len(message.stages):
        raise ProtocolViolationError(f"stage {message.stage} is not one of {len(message.stages)}")
    if message.replica >= max(1, len(message.rows)):
        raise ProtocolViolationError(f"row {message.replica} is not one of {max(1, len(message.rows))}")
    if not all(row.HasField("node") for row in message.rows):
        raise ProtocolViolationError(f"a row names no node of stage {message.stage}")
    return Placement(
        epoch=message.epoch,
        stage=message.stage,
        stages=_stages_from_proto(message.stages),
        replica=message.replica,
        rows=tuple(
            PlacedRow(
                node=PlacedStage(node_id=row.node.node_id, address=row.node.address),
                groups=tuple(row.groups),
            )
            for row in message.rows
        ),
        relays={one.node_id: _stages_from_proto(one.relays) for one in message.relays},
        also={one.node_id: tuple(one.addresses) for one in message.also},
    )


def _begin_from_proto(message: control_pb2.Begin) -> Begin:
    return Begin(
        epoch=message.epoch,
        step=message.step,
        link_windows=tuple(message.link_windows),
        keep_sums=message.keep_sums,
        audited=tuple(message.audited),
        waited_seconds=amount(message.waited_seconds, "a wait"),
        loss_scale=amount(message.loss_scale, "a loss scale"),
        digests=message.digests,
    )


def _commit_to_proto(message: Commit) -> control_pb2.Commit:
    then = None if message.then is None else control_pb2.Begin(**vars(message.then))
    return control_pb2.Commit(**{**vars(message), "then": then})


def _commit_from_proto(message: control_pb2.Commit) -> Commit:
    return Commit(
        epoch=message.epoch,
        step=message.step,
        clip_coefficient=amount(message.clip_coefficient, "a clip coefficient"),
        lr=amount(message.lr, "a learning rate"),
        waited_seconds=amount(message.waited_seconds, "a wait"),
        then=_begin_from_proto(message.then) if message.HasField("then") else None,
    )


def refusal_from_proto(message: enrolment_pb2.Refusal) -> Refusal:
    try:
        code = RefusalCode(message.code)
    except ValueError:
        raise ProtocolViolationError(f"unknown refusal code {message.code[:40]!r}") from None
    return Refusal(code=code, message=line(message.message))
