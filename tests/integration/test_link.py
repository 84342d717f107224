"""Links over real sockets and TLS: delivery, bounded memory, cut and silent connections, damage."""

import asyncio
import functools
import gc
import weakref
from dataclasses import replace

import pytest

import wire.link
from tests.support.links import SECONDS, content, eventually, key, make_pair, quick
from wire import pacing
from wire.byte_stream import StreamDroppedError
from wire.connection import now
from wire.errors import LinkError, LinkLostError, ProtocolViolationError
from wire.frames import HEADER_BYTES, MOST_PIECES, PAYLOAD_BYTES
from wire.line_meter import SPAN_SECONDS, Line
from wire.link import Link
from wire.link_state import LinkSettings, LinkState
from wire.pacing import KeepAlive
from wire.spec import Direction

MIB = 1024 * 1024


async def test_warm_link_has_two_sockets_and_a_round_trip() -> None:
    async with make_pair(1000) as pair:
        assert len(pair.relay.connections) == 2
        assert pair.lower.figures.round_trip_seconds > 0
        assert pair.upper.figures.round_trip_seconds > 0
        assert pair.lower.up and pair.upper.up


async def test_crossed_large_sends_arrive_bit_for_bit() -> None:
    """Both directions at once, each many windows long: neither waits for the other. The line that both ends
    have here sees what all carry."""
    size, count, line = 4 * MIB + 13, 6, Line()
    async with make_pair(size, replace(quick(window_bytes=MIB), line=line)) as pair:
        for i in range(count):
            pair.lower.send(key(i), content(key(i), size))
            back = key(i, Direction.GRADIENT)
            pair.upper.send(back, content(back, size))
        await asyncio.gather(pair.lower_end.until(count), pair.upper_end.until(count))
        for end in (pair.lower_end, pair.upper_end):
            assert len(end.arrived) == count
            assert all(buffer == content(k, size) for k, buffer in end.buffers.items())
        await eventually(lambda: pair.lower.queued_bytes == pair.upper.queued_bytes == 0)
        assert pair.lower.figures.retransmits == pair.upper.figures.retransmits == 0
        later = now() + 2 * SPAN_SECONDS
        frames = 2 * count * -(-size // PAYLOAD_BYTES)
        assert 0 < line.up(later) <= 2 * count * size
        assert 0 < line.down(later) <= 2 * count * size + frames * HEADER_BYTES


async def test_counted_bytes_are_those_on_the_sockets() -> None:
    """gRPC and TLS add less than 1 % to what the link counts, handshakes included."""
    size, count = 4 * MIB, 10
    async with make_pair(size) as pair:
        for i in range(count):
            pair.lower.send(key(i), content(key(i), size), size // 2)
        await pair.upper_end.until(count)
        await eventually(lambda: pair.lower.queued_bytes == 0)
        sent, received = pair.lower.figures.bytes, pair.upper.figures.bytes_received
        on_socket = pair.relay.up_bytes
        assert 0 <= sent - received < 1000  # a ping or so is on its way
        assert count * size < sent < on_socket < 1.01 * sent
        frames, pieces = pair.lower.frames[0], count * -(-size // PAYLOAD_BYTES)
        assert pieces / MOST_PIECES <= frames <= pieces, "more pieces in a frame on a quick line"
        (flow,) = pair.lower.figures.flows
        assert (flow.direction, flow.bytes) == (Direction.ACTIVATION, count * size + 64 * frames)
        assert flow.elements == count * size // 2


async def test_a_paused_stream_sends_a_byte_now_and_then_which_is_no_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "LEAST_ROUND_TRIP", 0.0)
    monkeypatch.setattr(pacing, "PERIOD_SECONDS", 0.01)
    left: list[float] = []
    sent = KeepAlive.sent

    def counted(warm: KeepAlive, now: float) -> None:
        left.append(now)
        sent(warm, now)

    monkeypatch.setattr(KeepAlive, "sent", counted)
    size = 1000
    async with make_pair(size) as pair:
        pair.lower.send(key(0), content(key(0), size))
        await pair.upper_end.until(1)
        await eventually(lambda: len(left) >= 5)
        pair.lower.send(key(1), content(key(1), size))
        await pair.upper_end.until(2)
        assert pair.upper_end.buffers[key(1)] == content(key(1), size)
        await eventually(lambda: pair.upper.frames[1] == pair.lower.frames[0] == 2)
        assert pair.upper.figures.rejects == pair.lower.figures.retransmits == 0


async def test_slow_consumer_stops_the_sender_and_bounds_memory() -> None:
    size, count, window = MIB, 16, 2 * MIB
    async with make_pair(size, quick(window_bytes=window)) as pair:
        pair.upper_end.releases = False
        for i in range(count):
            pair.lower.send(key(i), content(key(i), size))
        # 8 frames of credit: one tensor of 5, and the second may be finished.
        await pair.upper_end.until(2)
        sender = pair.lower._state.sender
        await eventually(lambda: sender.unacknowledged == 0)
        assert sender.next_frame(0.0) is None
        assert pair.upper._state.receiver.held_bytes == 2 * size
        assert pair.lower.queued_bytes == (count - 2) * size
        for i in range(count):
            pair.upper.release(key(i))
            await pair.upper_end.until(min(count, i + 3))
        assert pair.upper_end.arrived == [key(i) for i in range(count)]
        assert pair.upper._state.receiver.held_bytes == 0
        assert pair.upper._state.receiver.peak_held_bytes <= window + size


async def test_cut_connections_lose_and_repeat_nothing() -> None:
    size, count = 2 * MIB, 8
    async with make_pair(size) as pair:
        pair.relay.cut_after = 3 * MIB
        for i in range(count):
            pair.lower.send(key(i), content(key(i), size))
            back = key(i, Direction.GRADIENT)
            pair.upper.send(back, content(back, size))
        await pair.upper_end.until(3)
        pair.relay.cut()
        await asyncio.gather(pair.lower_end.until(count), pair.upper_end.until(count))
        await eventually(lambda: pair.lower.queued_bytes == pair.upper.queued_bytes == 0)
        for end in (pair.lower_end, pair.upper_end):
            assert len(end.arrived) == len(end.buffers) == count
            assert all(buffer == content(k, size) for k, buffer in end.buffers.items())
        assert pair.lower._state.reconnects >= 1
        assert len(pair.relay.connections) >= 4


async def test_what_is_to_follow_a_delivery_is_called_once_after_it() -> None:
    size, called = MIB, list[str]()
    async with make_pair(size) as pair:
        pair.lower.after_delivery(lambda: called.append("nothing is queued"))
        assert called == ["nothing is queued"]
        pair.relay.cut_after = size // 2
        for i in range(2):
            pair.lower.send(key(i), content(key(i), size))
            pair.lower.after_delivery(lambda i=i: called.append(f"{i}"))  # type: ignore[misc]
        assert len(called) == 1
        await eventually(lambda: len(called) == 3)
        assert called[1:] == ["0", "1"]
        assert pair.upper_end.arrived == [key(0), key(1)] and pair.lower.queued_bytes == 0
        pair.relay.flowing.clear()
        pair.lower.send(key(2), content(key(2), size))
        pair.lower.after_delivery(lambda: called.append("never"))
        await pair.lower.close()
    assert len(called) == 3


async def test_cutting_one_socket_closes_the_other() -> None:
    """A link never runs on half of its connections."""
    async with make_pair(MIB) as pair:
        pair.relay.connections[1].cut()
        await eventually(lambda: pair.lower._state.reconnects == 1 and pair.upper._state.reconnects == 1)
        pair.lower.send(key(0), content(key(0), MIB))
        await pair.upper_end.until(1)
        assert pair.upper_end.buffers[key(0)] == content(key(0), MIB)


async def test_silent_connection_is_replaced() -> None:
    """No reset, no close: the path drops everything."""
    # Longer than a busy machine leaves a process waiting: that would be a silence, too.
    async with make_pair(MIB, quick(silent_seconds=2.0, connect_seconds=2.0)) as pair:
        pair.relay.flowing.clear()
        pair.lower.send(key(0), content(key(0), MIB))
        await eventually(lambda: not pair.lower.up and not pair.upper.up)
        pair.relay.flowing.set()
        await pair.upper_end.until(1)
        assert pair.upper_end.arrived == [key(0)]
        # A tensor arrives before the end that sent it knows of the connection.
        await eventually(lambda: pair.lower._state.reconnects > 0)


async def test_a_neighbour_that_may_be_dead_is_told_of_before_its_connection_is_replaced() -> None:
    async with make_pair(MIB, quick(silent_seconds=SECONDS)) as pair:
        told = list[Link]()
        for link in (pair.lower, pair.upper):
            link.on_silent = functools.partial(told.append, link)
        pair.relay.flowing.clear()
        await eventually(lambda: {*told} == {pair.lower, pair.upper})
        assert pair.lower.up and pair.upper.up
        pair.relay.flowing.set()
        pair.lower.send(key(0), content(key(0), MIB))
        await pair.upper_end.until(1)
        told.clear()
        pair.relay.connections[1].cut()
        await eventually(lambda: {*told} == {pair.lower, pair.upper})


async def test_a_connection_that_delivers_no_frames_is_replaced() -> None:
    """The path drops all of the bulk stream and nothing of the control stream."""
    async with make_pair(MIB, quick(silent_seconds=2.0)) as pair:
        pair.lower.send(key(0), content(key(0), MIB))
        await pair.upper_end.until(1)
        bulk = max(pair.relay.connections, key=lambda one: one.up_bytes)
        assert bulk.up_bytes > MIB
        bulk.frozen = True
        pair.lower.send(key(1), content(key(1), MIB))
        await pair.upper_end.until(2)
        assert pair.upper_end.arrived == [key(0), key(1)]
        await eventually(lambda: pair.lower._state.reconnects > 0)


async def test_wrong_length_ends_both_ends_with_one_clear_line() -> None:
    async with make_pair(1000) as pair:
        pair.lower.send(key(0), bytes(1001))
        async with asyncio.timeout(SECONDS):
            errors = [await pair.upper.lost, await pair.lower.lost]
        assert isinstance(errors[0], ProtocolViolationError)
        for error in errors:
            assert "1001 bytes; 1000 were negotiated" in str(error)
            assert "\n" not in str(error)
        with pytest.raises(ProtocolViolationError):
            pair.upper.send(key(1), bytes(1000))
        assert pair.upper._state.receiver.peak_held_bytes == 0


async def test_neighbour_that_stays_away_is_lost_on_both_sides() -> None:
    async with make_pair(1000, quick(lost_after_seconds=0.3)) as pair:
        pair.relay.flowing.clear()
        pair.relay.cut()
        async with asyncio.timeout(SECONDS):
            errors = [await pair.lower.lost, await pair.upper.lost]
        for error in errors:
            assert isinstance(error, LinkLostError)
            assert "within 0.3 s" in str(error)
        with pytest.raises(LinkLostError):
            pair.lower.send(key(0), bytes(1000))


async def test_a_link_that_is_back_for_no_more_than_a_moment_is_lost_in_the_end() -> None:
    class Idle(Link):
        async def _keep_connected(self) -> None:
            await self._over.wait()

    state = LinkState.create(
        run_id="run-a",
        epoch=3,
        stage=0,
        peer_stage=1,
        settings=LinkSettings(lost_after_seconds=0.1),
        expect=lambda key: None,
        on_tensor=lambda key, buffer: None,
    )
    link = Idle(peer_node_id="node-aaaaaaaaaa", state=state)

    def comes_and_goes() -> None:
        connection = link._make_connection(1)
        connection._greeted.set()
        connection._ponged = True
        link._connection_changed()
        assert link.up
        connection.end(StreamDroppedError("gone"))
        assert not link.up

    async with asyncio.TaskGroup() as group, asyncio.timeout(SECONDS):
        group.create_task(link.run())
        await asyncio.sleep(0.01)
        comes_and_goes()
        await asyncio.sleep(0.01)
        comes_and_goes()
        assert isinstance(await link.lost, LinkLostError)


@pytest.mark.parametrize("run", [True, False])
async def test_a_closed_link_keeps_no_tensors(run: bool) -> None:
    """A node may know it for days: until it accepts a link in a later epoch."""

    class Sent(bytearray):
        """A bytearray that weak references can refer to."""

    async with make_pair(1000, run=run) as pair:
        pair.upper_end.releases = False
        if run:
            pair.lower.send(key(0), bytes(1000))
            await pair.upper_end.until(1)
            assert pair.upper._state.receiver.held_bytes == 1000
            pair.relay.flowing.clear()  # what follows waits
        sent = Sent(1000)
        waiting = weakref.ref(sent)
        pair.upper.send(key(0, Direction.GRADIENT), sent)
        del sent
        assert waiting() is not None
        await pair.upper.close()
        gc.collect()
        assert waiting() is None
        receiver = pair.upper._state.receiver
        assert (receiver._held, receiver._incoming, receiver._spare) == ({}, {}, [])
        assert pair.upper._state.receiver.held_bytes == pair.upper.queued_bytes == 0
        pair.upper.release(key(0))  # its consumer, on another thread, was not done with it


async def test_closed_link_takes_nothing_more() -> None:
    async with make_pair(1000) as pair:
        await pair.lower.close()
        with pytest.raises(LinkError, match="was closed here"):
            pair.lower.send(key(0), bytes(1000))
        assert not pair.lower.lost.done()
        await pair.lower.close()


async def test_closing_goes_on_when_its_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does while something else holds the loop. Whoever closes links has others to close."""
    monkeypatch.setattr(wire.link, "_CLOSE_SECONDS", 0.0)
    async with make_pair(1000) as pair:
        await pair.lower.close()
        assert not pair.lower._stopped.is_set()
        with pytest.raises(LinkError, match="was closed here"):
            pair.lower.send(key(0), bytes(1000))
        async with asyncio.timeout(SECONDS):
            await pair.lower._stopped.wait()


async def test_errors_of_a_callback_come_out_of_run() -> None:
    def broken(key: object, buffer: bytearray) -> None:
        raise ZeroDivisionError

    with pytest.raises(BaseExceptionGroup) as failures:
        async with make_pair(1000) as pair:
            pair.upper._state.on_tensor = broken
            pair.lower.send(key(0), bytes(1000))
            await pair.upper._stopped.wait()
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=SECONDS)
    assert failures.value.subgroup(ZeroDivisionError) is not None


async def test_cancelling_the_owner_amid_a_transfer_ends_everything() -> None:
    async with make_pair(64 * MIB, run=False) as pair:
        owner = asyncio.gather(pair.lower.run(), pair.upper.run())
        await pair.ready()
        pair.lower.send(key(0), bytes(64 * MIB))
        await eventually(lambda: pair.upper._state.receiver.held_bytes > 0)
        owner.cancel()
        async with asyncio.timeout(SECONDS):
            with pytest.raises(asyncio.CancelledError):
                await owner
            await pair.lower._stopped.wait()
            await pair.upper._stopped.wait()
