"""A member of a run that lies: a real node with a real certificate that alters what it tells the coordinator.

    python -m tests.support.liar LIE STEP MARKER join TOKEN ...

It does its part of every step; only its messages are wrong, from step STEP (counted from 0) on. `LIES` says
how. Or it computes wrong values, as a broken card does: `FLAWS`. The file MARKER gets the Unix time of the
first lie.
"""

import asyncio
import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.cli.main import main as thinwire
from node.schedule.gradient_groups import Piece
from node.stage import snapshot_transfer
from node.stage.coordinator_client import CoordinatorClient
from node.stage.stage_model import StageModel
from node.stage.state_copy import ReadLayer, StateCopy
from node.state.manifest import LayerFile, LayerSource
from node.state.serialization import deserialize_unit, serialize_unit
from node.state.snapshot_cache import LayerWriter
from node.training.group_sums import Gradient, PieceSums
from node.training.optimizer import StateTensor
from wire.errors import LinkError, ThinwireError
from wire.figures import LinkFigures
from wire.link import Link
from wire.messages import (
    Applied,
    Begin,
    Commit,
    CoordinatorMessage,
    FailureKind,
    Heartbeat,
    Hello,
    NodeMessage,
    Placed,
    Placement,
    Ready,
    RelayTimes,
    StateHashes,
    StepFailed,
    UnitHash,
    Vote,
)
from wire.spec import Direction, TensorKey
from wire.stream_sender import Payload, StreamSender
from wire.telemetry import Span, StepSpans, Telemetry

SLOW_SECONDS = 3.0
"""By how much a vote comes too late: in time for every deadline."""
FLOOD_SECONDS = 0.01
"""Seconds between two messages of a flood, which makes several megabytes a second."""
LATE = ", late"
"""Behind the name of a lie in layers: they are handed in when steps have gone on."""
UNASKED = 40
"""Uploads that nobody asked for before the liar's next vote: a fast run would be over before them."""


class Liar:
    """What one node lies about. One instance a process; it outlives sessions."""

    def __init__(self, lie: str, step: int, marker: Path) -> None:
        self.hands_in_late = lie.endswith(LATE)
        lie = lie.removesuffix(LATE)
        self.alter = LIES.get(lie, _honest)
        self.flaw = lie if lie in FLAWS else ""
        self.withholds_layers = lie == "withhold-layers"
        self.alter_layer = LAYERS.get(lie)
        self.uploads_unasked = lie == "unasked-layers"
        self.uploaded = asyncio.Event()
        self.flood = FLOODS.get(lie)
        self.drops_sessions = lie == "reconnect"
        self.does_nothing = lie == "idle"
        self.votes_late = lie == "slow-votes"
        self.first_step = step
        self.marker = marker
        self.placement: Placement | None = None
        self.begin: Begin | None = None
        self.tries: Counter[int] = Counter()
        """What it has done in each step."""

    @property
    def lying(self) -> bool:
        """Whether the first step to lie in has begun; records the time of the first lie."""
        due = self.begin is not None and self.begin.step >= self.first_step
        if due and not self.marker.exists():
            self.marker.write_text(repr(time.time()), encoding="utf-8")
        return due

    @property
    def stage(self) -> int:
        assert self.placement is not None
        return self.placement.stage

    def failed(self, kind: FailureKind, message: str, peer_stage: int = -1) -> StepFailed:
        """A failure of the step that runs."""
        assert self.begin is not None
        return StepFailed(
            epoch=self.begin.epoch, step=self.begin.step, kind=kind, message=message, peer_stage=peer_stage
        )

    def note(self, message: CoordinatorMessage) -> None:
        match message:
            case Placement():
                self.placement = message
            case Begin():
                self.begin = message
            case Commit() if message.then is not None:
                self.begin = message.then

    def install(self) -> None:
        """Replace the client's session and uploads in this process."""
        session, put_layer = CoordinatorClient.session, CoordinatorClient.put_layer
        hold_layers = CoordinatorClient.hold_layers
        ahead: dict[str, bytes] = {}
        """Weights that went ahead of their layers, as they stand in the file."""

        async def lying_session(
            client: CoordinatorClient,
            hello: Hello,
            outbox: "asyncio.Queue[NodeMessage]",
            handle: Callable[[CoordinatorMessage], Awaitable[None]],
            connected: Callable[[], None],
        ) -> None:
            async def noted(message: CoordinatorMessage) -> None:
                self.note(message)
                if self.drops_sessions and self.lying:
                    raise LinkError("dropped on purpose")
                if self.does_nothing and isinstance(message, Begin | Commit) and self.lying:
                    return
                await handle(message)

            floods = [asyncio.create_task(self._flood(outbox)), asyncio.create_task(unasked(client))]
            try:
                await session(client, hello, Altered(self, outbox), noted, connected)
            finally:
                for flood in floods:
                    flood.cancel()

        async def unasked(client: CoordinatorClient) -> None:
            uploads = 0
            while self.uploads_unasked:
                await asyncio.sleep(FLOOD_SECONDS)
                if self.lying:
                    with contextlib.suppress(ThinwireError):
                        await put_layer(client, 10**6, "embed", LayerFile.of(bytes(2**20)))
                    uploads += 1
                    if uploads >= UNASKED:
                        self.uploaded.set()

        async def no_layer(
            client: CoordinatorClient,
            step: int,
            unit: str,
            file: LayerSource,
            *,
            weights_alone: bool = False,
            weights_at: int = 0,
        ) -> None:
            if self.withholds_layers and self.lying:
                await asyncio.Event().wait()
            if self.hands_in_late and self.lying:
                await self._goes_on(step)
            if self.alter_layer is not None and self.lying:
                data = bytes(file.read(0, file.size))
                if weights_alone:
                    ahead[unit] = data[8 + int.from_bytes(data[:8], "little") :]  # behind the header
                left_out = ahead.get(unit, b"") if weights_at else b""
                data = self.alter_layer(data[:weights_at] + left_out + data[weights_at:])
                file = LayerFile.of(data[:weights_at] + data[weights_at + len(left_out) :])
            await put_layer(client, step, unit, file, weights_alone=weights_alone, weights_at=weights_at)

        async def no_layers(client: CoordinatorClient, *held: Any) -> Any:
            if self.withholds_layers and self.lying:
                await asyncio.Event().wait()
            return await hold_layers(client, *held)

        CoordinatorClient.session = lying_session  # type: ignore[method-assign]
        CoordinatorClient.put_layer = no_layer  # type: ignore[method-assign]
        CoordinatorClient.hold_layers = no_layers  # type: ignore[method-assign]
        if self.flaw:
            FLAWS[self.flaw](self)

    async def _goes_on(self, step: int) -> None:
        """Until nobody holds the state of `step` any more, if the run does not end before that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLOW_SECONDS):
                while self.begin is not None and self.begin.step <= step:  # noqa: ASYNC110
                    await asyncio.sleep(FLOOD_SECONDS)

    async def _flood(self, outbox: "asyncio.Queue[NodeMessage]") -> None:
        while self.flood is not None:
            await asyncio.sleep(FLOOD_SECONDS)
            if self.lying:
                outbox.put_nowait(self.flood(self))


class Altered(asyncio.Queue[NodeMessage]):
    """A node's queue of messages, read through its lies."""

    def __init__(self, liar: Liar, outbox: "asyncio.Queue[NodeMessage]") -> None:
        super().__init__()
        self._liar, self._outbox = liar, outbox
        self._altered: deque[NodeMessage] = deque()

    async def get(self) -> NodeMessage:
        while not self._altered:
            message = await self._outbox.get()
            if self._liar.votes_late and self._liar.lying and isinstance(message, Vote):
                await asyncio.sleep(SLOW_SECONDS)
            if self._liar.uploads_unasked and self._liar.lying:
                await self._liar.uploaded.wait()
            self._altered.extend(self._liar.alter(self._liar, message) if self._liar.lying else [message])
        return self._altered.popleft()


Lie = Callable[[Liar, NodeMessage], Sequence[NodeMessage]]


def _votes(change: Callable[[Liar, Vote], Sequence[NodeMessage]]) -> Lie:
    """Change votes, and leave all other messages alone."""
    return lambda liar, message: change(liar, message) if isinstance(message, Vote) else [message]


def _norms(value: Callable[[float], float]) -> Lie:
    return _votes(
        lambda _, vote: [replace(vote, norms={unit: value(norm) for unit, norm in vote.norms.items()})]
    )


def _some_links_fail(liar: Liar, vote: Vote) -> list[NodeMessage]:
    """Two failures in each step, which is then done."""
    if (tries := liar.tries[vote.step]) < 2:
        liar.tries[vote.step] = tries + 1
        return [liar.failed(FailureKind.LINK, "no frame came", liar.stage - 1 if liar.stage else 1)]
    return [vote]


def _never(kind: type[NodeMessage]) -> Lie:
    """Fail once, and never give this answer in the next epoch."""

    def alter(liar: Liar, message: NodeMessage) -> list[NodeMessage]:
        if isinstance(message, Vote) and not liar.tries:
            liar.tries[message.step] = 1
            return [liar.failed(FailureKind.INTERNAL, "once")]
        if isinstance(message, Heartbeat):
            return [replace(message, preparing=kind is Placed)]
        return [] if liar.tries and isinstance(message, kind) else [message]

    return alter


def _instead(kind: FailureKind, text: str) -> Lie:
    """A failure in place of each vote."""
    return _votes(lambda liar, _: [liar.failed(kind, text)])


def _accuse(liar: Liar, neighbours: Sequence[int]) -> list[NodeMessage]:
    assert liar.placement is not None and liar.begin is not None
    there = [stage for stage in neighbours if 0 <= stage < len(liar.placement.stages)]
    accused = there[liar.begin.epoch % len(there)]
    return [liar.failed(FailureKind.PEER, f"stage {accused} broke the protocol", accused)]


def _once(lie: Lie) -> Lie:
    """Only the first message that the lie changes."""
    told = False

    def alter(liar: Liar, message: NodeMessage) -> Sequence[NodeMessage]:
        nonlocal told
        altered = [message] if told else lie(liar, message)
        told = told or altered != [message]
        return altered

    return alter


def _honest(_: Liar, message: NodeMessage) -> list[NodeMessage]:
    return [message]


def _growing(liar: Liar, vote: Vote) -> list[NodeMessage]:
    times = 2.0 ** (vote.step - liar.first_step)
    return [replace(vote, norms={unit: times * norm for unit, norm in vote.norms.items()})]


def _die(liar: Liar, vote: Vote) -> list[NodeMessage]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


_NAN_NORMS = _norms(lambda _: math.nan)
LIES: dict[str, Lie] = {
    "nan-once": _once(_NAN_NORMS),
    "nan": _NAN_NORMS,
    "not-finite": _instead(FailureKind.NON_FINITE, "a gradient"),
    "internal": _instead(FailureKind.INTERNAL, "something broke"),
    "accuse-one": _votes(lambda liar, _: _accuse(liar, [liar.stage - 1 if liar.stage else 1])),
    "accuse-both": _votes(lambda liar, _: _accuse(liar, [liar.stage - 1, liar.stage + 1])),
    "blame-link": _votes(
        lambda liar, _: [liar.failed(FailureKind.LINK, "no frame came", liar.stage - 1 if liar.stage else 1)]
    ),
    "negative-norm": _norms(lambda _: -1.0),
    "no-vote": _votes(lambda *_: []),
    "no-applied": lambda _, message: [] if isinstance(message, Applied) else [message],
    "silent": lambda *_: [],
    "reconnect": _honest,
    "idle": _honest,
    "slow-votes": _honest,
    "withhold-layers": _honest,
    "unasked-layers": _honest,
    "huge-layers": _honest,
    "short-layers": _honest,
    "other-layers": _honest,
    "negative-layers": _honest,
    "flood-heartbeats": _honest,
    "flood-spans": _honest,
    "huge-loss": _votes(lambda _, vote: [replace(vote, loss=-1e300)]),
    "norms-of-others": _votes(
        lambda _, vote: [replace(vote, norms={**{unit: 1e6 for unit in range(5)}, **vote.norms})]
    ),
    "huge-norm": _norms(lambda _: 1e60),
    "growing-norms": _votes(_growing),
    "dies": _votes(_die),
}
"""By name: what it sends in place of a message."""


def _altered_layer(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[bytes], bytes]:
    return lambda data: serialize_unit(change(deserialize_unit(data)))


LAYERS: dict[str, Callable[[bytes], bytes]] = {
    "huge-layers": lambda _: bytes(2**26),
    "short-layers": lambda data: data[: len(data) // 2],
    "other-layers": _altered_layer(lambda state: {name: value.double() for name, value in state.items()}),
    "negative-layers": _altered_layer(
        lambda state: {name: -value - 1 if "_sq" in name else value for name, value in state.items()}
    ),
}
"""By name: the file that it hands in for a layer's."""


def _wrong_activations(liar: Liar) -> None:
    forward = StageModel.forward

    def flawed(model: StageModel, *step: Any, **given: Any) -> Tensor:
        result = forward(model, *step, **given)
        return result * 1.001 if liar.lying else result

    StageModel.forward = flawed  # type: ignore[method-assign]


def _wrong_gradients(liar: Liar) -> None:
    leaves = PieceSums.leaves

    def flawed(sums: PieceSums, batch: Sequence[Piece], gradients: Mapping[str, Gradient]) -> list[Tensor]:
        if liar.lying:
            gradients = {name: -one if isinstance(one, Tensor) else one for name, one in gradients.items()}
        return leaves(sums, batch, gradients)

    PieceSums.leaves = flawed  # type: ignore[method-assign]


FLAWS: dict[str, Callable[[Liar], None]] = {
    "wrong-activations": _wrong_activations,
    "wrong-gradients": _wrong_gradients,
}
"""By name: makes this process compute finite values that are wrong."""


Alter = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def _snapshots(said: Alter, given: Alter) -> Callable[[Liar], None]:
    """Lie about the state at snapshots: in the hashes that it says, and in the layers that it hands in."""

    def install(liar: Liar) -> None:
        read, hashed = snapshot_transfer.read_layer, snapshot_transfer.hash_layer

        def altered(state: StateCopy, unit: str, change: Alter) -> StateCopy:
            tensors = change(state.whole(unit))
            copy = StateCopy([(unit, {name: StateTensor(one, one.dtype) for name, one in tensors.items()})])
            copy.weights_first = state.weights_first
            return copy

        def layer(state: StateCopy, unit: str, file: LayerWriter | None, reports: int | None) -> ReadLayer:
            if not liar.lying:
                return read(state, unit, file, reports)
            handed_in = read(altered(state, unit, given), unit, file, reports)
            return handed_in._replace(hash=hashes(state, unit))

        def hashes(state: StateCopy, unit: str) -> UnitHash:
            return hashed(altered(state, unit, said) if liar.lying else state, unit)

        snapshot_transfer.read_layer = layer
        snapshot_transfer.hash_layer = hashes

    return install


def _floats(change: Callable[[Tensor], Tensor], prefix: str = "") -> Alter:
    def alter(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            name: change(one) if one.is_floating_point() and name.startswith(prefix) else one
            for name, one in tensors.items()
        }

    return alter


def _same(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return tensors


def _scrambled(one: Tensor) -> Tensor:
    """Finite, of the same norm, and of another model."""
    return one.flatten().flip(0).reshape(one.shape)


_ZEROS, _RANDOM = _floats(torch.zeros_like), _floats(_scrambled)
_SCALED = _floats(lambda one: one * 1.001, "parameter.")
_NO_MOMENTS = _floats(torch.zeros_like, "exp_avg")
FLAWS |= {
    "zero-layers": _snapshots(_ZEROS, _ZEROS),
    "random-layers": _snapshots(_RANDOM, _RANDOM),
    "scaled-layers": _snapshots(_SCALED, _SCALED),
    "zero-moments": _snapshots(_NO_MOMENTS, _NO_MOMENTS),
    "hash-of-another": _snapshots(_RANDOM, _same),
    "layer-of-another": _snapshots(_same, _RANDOM),
}


def _heartbeat(_: Liar) -> NodeMessage:
    links = tuple(
        LinkFigures(
            target=stage, bytes=1, bytes_received=1, retransmits=0, rejects=0, round_trip_seconds=0.01
        )
        for stage in range(4000)
    )
    return Heartbeat(telemetry=Telemetry(links=links))


def _spans(liar: Liar) -> NodeMessage:
    assert liar.begin is not None
    spans = tuple(Span("forward", float(n), 0.1) for n in range(2000))
    return StepSpans(
        epoch=liar.begin.epoch,
        step=liar.begin.step,
        stage=liar.stage,
        clock_offset=0.0,
        clock_error=0.0,
        dropped=0,
        spans=spans,
    )


FLOODS: dict[str, Callable[[Liar], NodeMessage]] = {"flood-heartbeats": _heartbeat, "flood-spans": _spans}
"""By name: the message that it sends again and again."""


def _tensors(change: Callable[[bytes], Sequence[bytes]]) -> Callable[[Liar], None]:
    """Send others in place of each packed tensor."""

    def install(liar: Liar) -> None:
        send = Link.send

        def altered(link: Link, key: TensorKey, payload: Payload, elements: int = 0) -> None:
            for data in change(bytes(payload)) if liar.lying else [payload]:
                send(link, key, data, elements)

        Link.send = altered  # type: ignore[method-assign]

    return install


def _kept(*directions: Direction) -> Callable[[Liar], None]:
    """Keep the tensors of these directions."""

    def install(liar: Liar) -> None:
        send = Link.send

        def most(link: Link, key: TensorKey, payload: Payload, elements: int = 0) -> None:
            if key.direction not in directions or not liar.lying:
                send(link, key, payload, elements)

        Link.send = most  # type: ignore[method-assign]

    return install


def _frames(change: Callable[[bytes], bytes]) -> Callable[[Liar], None]:
    def install(liar: Liar) -> None:
        next_frame = StreamSender.next_frame

        def altered(sender: StreamSender, now: float) -> bytes | None:
            frame = next_frame(sender, now)
            return change(frame) if frame is not None and liar.lying else frame

        StreamSender.next_frame = altered  # type: ignore[method-assign]

    return install


def _late_tensors(liar: Liar) -> None:
    send = Link.send

    def late(link: Link, *tensor: Any) -> None:
        if liar.lying:
            time.sleep(SLOW_SECONDS / 4)
        send(link, *tensor)

    Link.send = late  # type: ignore[method-assign]


FLAWS |= {
    "no-tensors": _tensors(lambda _: []),
    "kept-gradients": _kept(Direction.GRADIENT),
    "kept-parts": _kept(Direction.SYNC_SHARE),
    "kept-sums": _kept(Direction.SYNC_SUM),
    "ones-tensors": _tensors(lambda data: [b"\xff" * len(data)]),
    "short-tensors": _tensors(lambda data: [data[:-8]]),
    "long-tensors": _tensors(lambda data: [data + bytes(2**20)]),
    "repeated-tensors": _tensors(lambda data: [data, data]),
    "random-frames": _frames(lambda frame: os.urandom(len(frame))),
    "late-tensors": _late_tensors,
}


def _placed(claimed: Callable[[int], int]) -> Lie:
    """It fails in each step, and then says that it holds the state of another one."""

    def alter(liar: Liar, message: NodeMessage) -> list[NodeMessage]:
        if isinstance(message, Placed):
            return [replace(message, held_step=claimed(message.held_step), voted=True)]
        return [liar.failed(FailureKind.INTERNAL, "again")] if isinstance(message, Vote) else [message]

    return alter


REPLAYS_AFTER = 5
"""Steps after the first one to lie in: a snapshot is stored by then."""


def _replayed_loss(liar: Liar, message: NodeMessage) -> list[NodeMessage]:
    """It fails once and says that it holds no state, so that all load a snapshot. Then its loss is another
    than before."""
    if isinstance(message, Placed) and liar.tries:
        return [replace(message, held_step=-1, voted=False)]
    if not isinstance(message, Vote) or (message.step < liar.first_step + REPLAYS_AFTER and not liar.tries):
        return [message]
    liar.tries[message.step] += 1
    if liar.tries.total() == 1:
        return [liar.failed(FailureKind.INTERNAL, "once")]
    return [replace(message, loss=message.loss and message.loss + 1.0)]


LIES |= {
    "replayed-loss": _replayed_loss,
    "false-place": _placed(lambda _: 10**6),
    "some-links-fail": _votes(_some_links_fail),
    "never-places": _never(Placed),
    "never-loads": _never(Ready),
    "next-place": _placed(lambda held: held + 1),
    "flood-hashes": _honest,
    "flood-times": _honest,
}


def _begun(liar: Liar) -> Begin:
    assert liar.begin is not None
    return liar.begin


_turn = itertools.count()
FLOODS |= {
    "flood-hashes": lambda liar: StateHashes(
        epoch=_begun(liar).epoch,
        step=next(_turn),
        units={unit: UnitHash("ab" * 32, 1.0, 1.0, 1.0) for unit in range(500)},
    ),
    "flood-times": lambda liar: RelayTimes(times={f"node-{number:010}": 0.0 for number in range(2000)}),
}


def main() -> int:
    lie, step, marker = sys.argv[1:4]
    Liar(lie, int(step), Path(marker)).install()
    sys.argv = ["thinwire", *sys.argv[4:]]
    return thinwire()


if __name__ == "__main__":
    sys.exit(main())
