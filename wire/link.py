"""A link to one neighbour in one epoch: tensors in both directions, over connections that may break.

    link = dial_link(...)  or  server.expect_peer(...)
    async with asyncio.TaskGroup() as group:
        group.create_task(link.run())
        await link.ready(60)
        link.send(key, packed)

Tensors are sent, wanted and released on any thread; call everything else on the event loop. One end dials;
`link_server.py` has the accepting side.
"""

import asyncio
import contextlib
import math
import secrets
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc.aio

from wire.byte_stream import BulkClient, ClientCall, ClientStream, StreamDroppedError
from wire.channels import BulkChannel, LinkIdentity, open_channel
from wire.connection import NO_FRAMES, Connection, now, wait_until
from wire.delivery import SLOW_TIMES
from wire.errors import (
    LinkClosedError,
    LinkLostError,
    ProtocolViolationError,
    RefusalCode,
    Refused,
    ThinwireError,
)
from wire.figures import LinkFigures
from wire.link_state import LinkSettings, LinkState, OnTensor
from wire.pacing import Backoff
from wire.spec import TensorKey
from wire.stream_receiver import Expect
from wire.stream_sender import Payload
from wire.telemetry import DIRECT, NOT_TOGETHER, TOGETHER, is_relayed
from wire.version import PROTOCOL

BULK_METHOD = "/thinwire.wire.v1.Link/Bulk"
CONTROL_METHOD = "/thinwire.wire.v1.Link/Control"
METADATA_PREFIX = "thinwire-"
"""The prefix of metadata keys. Both calls carry protocol, epoch, stage, session and attempt as decimal
numbers."""

PATIENCE_SECONDS = 2.0
"""For this many seconds a direct path that fails is tried again before another path is."""
PATH_SECONDS = 3.0
"""One attempt to connect may take this long while there is another path."""
RELAY_SILENT_SECONDS = 2.0
"""A relay that is silent for this long is left, where there is another."""
TOO_SLOW = "the relay is too slow"
"""The end that is dialled says this when it ends a connection."""
JUDGE_SECONDS = 0.5
"""This often the link looks at what a relay delivers."""
MOST_BREAKS = 2
"""After this many broken connections through one relay, other relays are tried first."""
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 300.0
"""The time from changing to a path until the link looks for a better one. It triples each time, up to the
longest."""
QUIET_SECONDS, QUIET_POLL_SECONDS = 30.0, 0.02
"""How long a better path waits until nothing is in flight, and how often that is checked."""
_CLOSE_SECONDS = 5.0

__all__ = ["DialledLink", "Link", "LinkPath", "LinkSettings", "dial_link"]


class Link(ABC):
    """One neighbour's link. `lost` gets the error to show when the link is given up."""

    def __init__(self, *, peer_node_id: str, state: LinkState) -> None:
        self.peer_node_id = peer_node_id
        self.path = DIRECT
        """The path of the newest connection."""
        self.lost: asyncio.Future[ThinwireError] = asyncio.get_running_loop().create_future()
        self._state = state
        state.loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._trouble = "no connection was made yet"
        self._was_up = False
        self._up = asyncio.Event()
        self._down = asyncio.Event()  # it was up and no longer is
        self._over = asyncio.Event()  # closed or lost
        self._stopped = asyncio.Event()
        self._running = False
        self.on_silent: Callable[[], None] = lambda: None
        """Called when the neighbour may be dead: its connection has closed, or nothing comes by it."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} epoch {self.epoch} to {self._peer} {'up' if self.up else 'down'}>"

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def rows(self) -> int:
        return self._state.rows

    @property
    def peer_stage(self) -> int:
        return self._state.peer_stage

    @property
    def up(self) -> bool:
        """Whether both sockets are open, and a ping was answered on this connection."""
        return self._up.is_set() and not self._over.is_set()

    @property
    def trouble(self) -> str:
        """Why the newest connection ended; before the first, that there was none."""
        return self._trouble

    @property
    def figures(self) -> LinkFigures:
        """Totals since the link was made, and what it is like now. The flows' codecs are not named."""
        state = self._state
        with state.lock:
            return replace(
                state.figures,
                source=state.stage,
                target=state.peer_stage,
                path=self.path,
                retransmits=state.sender.retransmits,
                rejects=state.receiver.rejects,
                busy_seconds=state.meter.busy_seconds(now()),
                processor_seconds=state.processor_seconds,
                capacity=state.meter.capacity,
                queued_bytes=state.sender.queued_bytes,
            )

    @property
    def frames(self) -> tuple[int, int]:
        """Frames sent, and frames received."""
        return self._state.frames_sent, self._state.frames_received

    @property
    def queued_bytes(self) -> int:
        """The bytes of tensors that wait to be sent or acknowledged."""
        return self._state.sender.queued_bytes

    def send(self, key: TensorKey, payload: Payload, elements: int = 0) -> None:
        """Queue a tensor's packed bytes; never blocks. The bytes must not change until acknowledged.

        `elements`: how many these are of, for `figures`. Raises the link's error after it has ended,
        `LinkError` when the outbox is full.
        """
        with self._state.lock:
            self._raise_if_over()
            self._state.sender.send(key, payload)
            self._state.elements.append(elements)
            self._state.meter.queued(self._state.sender.sent_bytes, now())
            self._state.bulk_wake.notify_all()

    def after_delivery(self, call: Callable[[], None]) -> None:
        """Call once the neighbour has every tensor queued so far, at once if it has; never if the link ends
        first."""
        self._state.after_delivery(call)

    def release(self, key: TensorKey) -> None:
        """The consumer is done with a received tensor: free its room in the window."""
        receiver = self._state.receiver
        with self._state.lock:
            if self._over.is_set():
                return
            due = receiver.deadline
            receiver.release(key, now())
            # Most often the credit goes with the next acknowledgement.
            is_news = receiver.deadline < due
        if is_news:
            self._state.wake_control()

    def want(self, key: TensorKey | None) -> None:
        """The consumer waits for this tensor and releases nothing until then; None: it stopped waiting.

        Call it whenever the next tensor needed has not arrived. Otherwise tensors sent before it can fill the
        window (see `stream_receiver.py`).
        """
        with self._state.lock:
            self._state.receiver.want(key, now())
        self._state.wake_control()

    async def ready(self, seconds: float) -> None:
        """Wait until the link is up. Raises `LinkLostError` if that takes longer, or the link's error."""
        try:
            async with asyncio.timeout(seconds):
                await self._up.wait()
        except TimeoutError as error:
            raise LinkLostError(
                f"the link to {self._peer} was not up within {seconds:g} s: {self._trouble}; "
                "check that the node runs and that its address can be reached from here"
            ) from error
        self._raise_if_over()

    async def run(self) -> None:
        """Keep the link connected until it is closed or lost. Raises errors of callbacks."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                work = self._keep_connected(), self._watch(), self._watch_relay()
                tasks = [group.create_task(part) for part in work]
                try:
                    await self._over.wait()
                finally:
                    # Before 3.13 a task group loses a cancellation that meets a failing child, so the loops
                    # also check `_over`.
                    self._finish()
                for task in tasks:
                    task.cancel()
        finally:
            self._finish()
            self._state.forget()
            self._stopped.set()

    async def close(self) -> None:
        """Drop the connection for good. Unacknowledged tensors may be lost.

        Returns when `run` has ended, or after `_CLOSE_SECONDS`; `run` then ends a little later.
        """
        self._finish()
        if self._running:
            # The wait may time out because something else blocks the loop; that is no failure of this link.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._stopped.wait()
        else:
            self._state.forget()

    @abstractmethod
    async def _keep_connected(self) -> None:
        """Make and run one connection after the other until the link has ended."""

    @property
    def _peer(self) -> str:
        return f"stage {self.peer_stage} (node {self.peer_node_id})"

    def _finish(self) -> None:
        self._over.set()
        self._up.set()  # wakes `ready`, which then raises
        if self._connection is not None:
            self._connection.end(StreamDroppedError("the link was closed here"))

    def _fail(self, error: ThinwireError) -> None:
        if not self.lost.done() and not self._over.is_set():
            self.lost.set_result(error)
        self._finish()

    def _raise_if_over(self) -> None:
        if self.lost.done():
            raise self.lost.result()
        if self._over.is_set():
            raise LinkClosedError(f"the link to {self._peer} was closed here")

    def _make_connection(self, attempt: int, silent_seconds: float | None = None) -> Connection:
        connection = Connection(self._state, attempt, self._connection_changed, silent_seconds)
        connection.on_silent = self._silent
        self._connection = connection
        return connection

    def _silent(self) -> None:
        if self.up:
            self.on_silent()

    def _connection_changed(self) -> None:
        connection = self._connection
        if connection is None or self._over.is_set():
            return
        if connection.up and not self._up.is_set():
            self._state.reconnects += self._was_up
            self._was_up = True
            self._down.clear()
            self._up.set()
        elif connection.ended and connection.error is not None:
            self._trouble = str(connection.error)
            self._silent()
            if self._up.is_set():
                self._up.clear()
                self._down.set()
            if isinstance(connection.error, ProtocolViolationError):
                self._fail(ProtocolViolationError(f"the link to {self._peer} was given up: {self._trouble}"))

    async def _watch_relay(self) -> None:
        """Leave a relay that delivers far less than it owes, where that may help."""
        service = self._state.service
        while not self._over.is_set():
            await wait_until(self._over, now() + JUDGE_SECONDS)
            connection = self._connection
            if connection is None or not self.up or not is_relayed(self.path):
                continue
            with self._state.lock:
                slow = service.is_slow(now())
                if self._leaves_relay(service.times(now()) if slow else 0.0):
                    connection.end(StreamDroppedError(TOO_SLOW))
                elif slow:
                    service.connected()  # judged anew

    def _leaves_relay(self, times: float) -> bool:
        """Whether to end the connection by a relay that takes so many times as long as it owes; 0: it is not
        slow."""
        return False

    async def _watch(self) -> None:
        """Give the link up when it has been down for `lost_after_seconds`; at first `ready` is the limit.

        A connection may come up and end before this runs: then both waits start again.
        """
        limit = self._state.settings.lost_after_seconds
        while not self._over.is_set():
            await self._down.wait()
            try:
                async with asyncio.timeout(limit):
                    await self._up.wait()
            except TimeoutError:
                self._fail(
                    LinkLostError(
                        f"the link to {self._peer} was not back within {limit:g} s: {self._trouble}; "
                        "check that node and the network between"
                    )
                )


@dataclass(frozen=True, kw_only=True)
class LinkPath:
    """A way to a neighbour."""

    name: str
    """One of the names in `wire.telemetry`."""
    address: str
    """What gRPC dials: host:port, or unix:PATH."""
    shown: str
    """The address as people see it."""
    trouble: Callable[[], str] = str
    """Why the newest attempt beyond `address` failed; empty if it did not."""
    leave: Callable[[], None] = lambda: None
    """Called when a connection by this path has ended."""
    seconds: float = PATH_SECONDS
    """The limit for one attempt to connect while there is another path."""
    in_background: bool = False
    """It takes long to fail: tried last, and while another path carries the link."""


@dataclass(frozen=True)
class _Prepared:
    """A path that answers, with its open channels."""

    path: LinkPath
    bulk: BulkChannel
    control: grpc.aio.Channel

    async def close(self) -> None:
        await self.bulk.close()
        await self.control.close()


class DialledLink(Link):
    """The link at the end that dials. After a failure it takes the next of its paths.

    While it does not use its best path, it looks for a better one from time to time. It changes to one
    that answers when nothing is in flight, that is, between two steps. The channels of the new path are
    open by then, so the change takes two round trips.
    """

    def __init__(
        self, *, identity: LinkIdentity, peer_node_id: str, paths: Sequence[LinkPath], state: LinkState
    ) -> None:
        """`paths`: one or more, the best first."""
        super().__init__(peer_node_id=peer_node_id, state=state)
        self._ranked = tuple(paths)
        self._paths = deque(sorted(paths, key=lambda path: path.in_background))
        self._prepared: _Prepared | None = None
        self._look_pause = LOOK_SECONDS
        """The seconds from one look for a better path to the next."""
        self._look = asyncio.Event()
        self._identity = identity
        self.path = self._paths[0].name
        self.why_not: dict[str, str] = {}
        """Why the newest attempt failed, by path."""
        self._breaks: Counter[str] = Counter()
        """The number of broken connections, by relayed path."""
        self._slow: dict[str, tuple[float, float]] = {}
        """For each relayed path that was left: how many times as long as owed it took, and when."""
        self._untold: set[str] = set()
        """Those paths of which it is not known yet that others are faster."""

    @property
    def figures(self) -> LinkFigures:
        reason = self.why_not.get(TOGETHER, "") if is_relayed(self.path) else ""
        known = (word for word, words in NOT_TOGETHER.items() if words in reason)
        return replace(super().figures, not_together=next(known, ""))

    @property
    def _peer(self) -> str:
        return f"{super()._peer} at {self._paths[0].shown}"

    async def _keep_connected(self) -> None:
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look_for_better())
            try:
                await self._dial()
            finally:
                looking.cancel()

    async def _dial(self) -> None:
        settings = self._state.settings
        attempt, backoff = 0, Backoff(settings.backoff_seconds, settings.max_backoff_seconds)
        down_since = now()
        while not self._over.is_set():
            attempt += 1
            prepared, self._prepared = self._prepared, None
            if prepared is not None and prepared.path is not self._paths[0]:
                self._rotate_to(lambda other: other is prepared.path)  # noqa: B023 - called at once
            path = self._paths[0]
            self.path = path.name
            leaves_soon = is_relayed(path.name) and self._relays > 1
            connection = self._make_connection(attempt, RELAY_SILENT_SECONDS if leaves_soon else None)
            try:
                await self._connect(connection, path, prepared)
            except StreamDroppedError as error:
                connection.end(StreamDroppedError(path.trouble() or str(error), error.refusal))
            path.leave()
            if isinstance(connection.error, StreamDroppedError) and connection.error.refusal:
                self._fail(_refused(connection.error, self._peer))
            if connection.was_up:
                backoff.reset()
                down_since = now()
                if self._prepared is not None:
                    continue
                if leaves_soon:
                    # Its relay died or froze: the next is there, and this one is tried again later.
                    self._breaks[path.name] += 1
                    if path.name not in self._slow:
                        if str(connection.error) in (TOO_SLOW, NO_FRAMES):
                            self._left(2 * SLOW_TIMES)
                        elif self._breaks[path.name] >= MOST_BREAKS:
                            self._left(math.inf)
                    best = self._best_relay()
                    self._rotate_to(lambda other: other is best)  # noqa: B023 - called at once
            else:
                self.why_not[path.name] = str(connection.error or "")
                if path.name != DIRECT or now() - down_since >= PATIENCE_SECONDS:
                    self._paths.rotate(-1)
                elif sum(other.name == DIRECT for other in self._ranked) > 1:
                    # The neighbour's other address.
                    self._rotate_to(lambda other: other.name == DIRECT)
            await wait_until(self._over, now() + backoff.advance())

    def _leaves_relay(self, times: float) -> bool:
        if not times:
            self._tell_of_slower()
            return False
        best = self._best_relay()
        if best is self._paths[0] or self._times_of(best) > times / 2:
            return False
        self._left(times)
        return True

    def _left(self, times: float) -> None:
        self._slow[self.path] = times, now()
        self._untold.add(self.path)

    def _tell_of_slower(self) -> None:
        """Name relays that were left, once this one is known to be faster."""
        tell, at = self._state.settings.on_relay_left, now()
        for path in sorted(self._untold - {self.path}):
            if self._state.service.is_faster(self._slow[path][0], at):
                self._untold.discard(path)
                if tell is not None:
                    tell(path)

    def _times_of(self, path: LinkPath) -> float:
        """How slow a path recently was; 0 if nothing is known against it."""
        times, at = self._slow.get(path.name, (0.0, -math.inf))
        return times if now() - at < LONGEST_LOOK_SECONDS else 0.0

    def _best_relay(self) -> LinkPath:
        """The relay against which least is known, of equals the next after the one that carries the link."""
        others = [path for path in [*self._paths][1:] if is_relayed(path.name)]
        return min(others, key=self._times_of, default=self._paths[0])

    @property
    def _relays(self) -> int:
        return sum(is_relayed(path.name) for path in self._ranked)

    def _rotate_to(self, wanted: Callable[[LinkPath], bool]) -> None:
        self._paths.rotate(-1)
        while not wanted(self._paths[0]):
            self._paths.rotate(-1)

    def add_paths(self, paths: Sequence[LinkPath]) -> None:
        """Add ways to the neighbour, which are better than the last one so far."""
        self._ranked = (*self._ranked[:-1], *paths, self._ranked[-1])
        self._paths.extend(paths)
        self._look_pause = LOOK_SECONDS
        self._look.set()

    async def _look_for_better(self) -> None:
        while not self._over.is_set():
            await wait_until(self._look, now() + self._look_pause)
            self._look.clear()
            if not self.up or self._paths[0] is self._ranked[0]:
                continue
            self._look_pause = min(3 * self._look_pause, LONGEST_LOOK_SECONDS)
            for path in self._ranked[: self._ranked.index(self._paths[0])]:
                if self._times_of(path):
                    continue
                if (prepared := await self._prepare(path)) is not None:
                    await self._take(prepared)
                    break

    async def _prepare(self, path: LinkPath) -> _Prepared | None:
        """The path's channels, if it answers."""
        prepared = self._channels(path)
        try:
            async with asyncio.timeout(path.seconds):
                await asyncio.gather(prepared.bulk.ready(), prepared.control.channel_ready())
        except BaseException as error:
            await prepared.close()
            path.leave()
            if isinstance(error, TimeoutError):
                self.why_not[path.name] = path.trouble() or f"no answer within {path.seconds:g} s"
                return None
            raise
        return prepared

    async def _take(self, prepared: _Prepared) -> None:
        """Change to this path once nothing is on its way."""
        deadline = now() + QUIET_SECONDS
        while self.queued_bytes and now() < deadline:
            await wait_until(self._over, now() + QUIET_POLL_SECONDS)
        if not self.up or self._over.is_set() or self._connection is None:
            await prepared.close()
            prepared.path.leave()
            return
        self._prepared = prepared
        self._was_up = False  # what follows is no reconnect
        self._connection.end(StreamDroppedError("a better path is there"))

    def _channels(self, path: LinkPath) -> _Prepared:
        identity, unread_bytes = self._identity, self._state.settings.unread_bytes
        name = identity.server_name(self.peer_node_id)
        bulk = BulkChannel(path.address, identity=identity, server_name=name, unread_bytes=unread_bytes)
        return _Prepared(path, bulk, open_channel(path.address, identity=identity, server_name=name))

    async def _connect(self, connection: Connection, path: LinkPath, prepared: _Prepared | None) -> None:
        state = self._state
        numbers = {
            "protocol": PROTOCOL,
            "epoch": state.epoch,
            "stage": state.stage,
            "rows": state.rows,
            "session": state.session,
            "attempt": connection.attempt,
        }
        metadata = tuple((METADATA_PREFIX + key, str(value)) for key, value in numbers.items())
        seconds = state.settings.connect_seconds
        if len(self._paths) > 1:
            seconds = min(seconds, path.seconds)
        channels = prepared or self._channels(path)
        try:
            bulk = BulkClient(channels.bulk.channel, BULK_METHOD, metadata, connection.frames())
            control = ClientStream(_call(channels.control, CONTROL_METHOD, metadata))
            try:
                async with asyncio.timeout(seconds):
                    await bulk.opened()
                    await control.opened()
            except TimeoutError as error:
                raise StreamDroppedError(f"no answer within {seconds:g} s") from error
            await connection.run(bulk, control)
        finally:
            await channels.close()


def dial_link(
    *,
    identity: LinkIdentity,
    run_id: str,
    epoch: int,
    stage: int,
    peer_node_id: str,
    peer_stage: int,
    peer_address: str = "",
    paths: Sequence[LinkPath] = (),
    expect: Expect,
    on_tensor: OnTensor,
    settings: LinkSettings | None = None,
    rows: int = 0,
) -> DialledLink:
    """A link to the neighbour at `peer_address` ("host:port"), or by other `paths` if that is empty or
    fails. Call it on the loop, then run it.

    `expect` returns the exact length of a tensor that may arrive; `on_tensor` gets each one, once. `rows`
    stands for the rows of the two ends, and is the same at both.
    """
    state = LinkState.create(
        run_id=run_id,
        epoch=epoch,
        stage=stage,
        peer_stage=peer_stage,
        settings=settings or LinkSettings(),
        expect=expect,
        on_tensor=on_tensor,
        rows=rows,
    )
    state.open_session(secrets.randbits(64))
    if peer_address:
        paths = (LinkPath(name=DIRECT, address=peer_address, shown=peer_address), *paths)
    return DialledLink(identity=identity, peer_node_id=peer_node_id, paths=paths, state=state)


def _call(channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...]) -> ClientCall:
    # No serializers: messages are bytes.
    call: ClientCall = channel.stream_stream(method)(metadata=metadata)
    return call


def _refused(error: StreamDroppedError, peer: str) -> Refused:
    known = error.refusal in RefusalCode._value2member_map_
    code = RefusalCode(error.refusal) if known else RefusalCode.BAD_REQUEST
    return Refused(code, f"{peer} refused the link: {error}")
