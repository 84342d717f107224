"""Joins two connected sockets: what one receives, the other sends, in bounded memory.

On Linux the bytes stay in the kernel (splice(2)), which moves them from a socket to a pipe and on to the
other socket without a copy. Elsewhere, and if many directions wait at once, they pass through a buffer of
this process. All of it happens on the carrier's thread (`wire.event_loop`). The process's event loop
carries no byte, and no byte waits for it.
"""

import asyncio
import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Protocol

from wire.event_loop import carrier
from wire.pacing import Pacer

CLOSE_SECONDS = 5.0
"""A closed connection's last bytes may take this long."""
STORE_BYTES = 256 * 1024
"""The most bytes that one direction holds between receiving and sending; nothing more is read meanwhile."""
_TURNS = 8
"""So many reads of one direction come before the loop's other work."""
_SHORT_BYTES = 16 * 1024
"""A read of less than this usually took everything there was, so another read would find nothing."""
_MOST_PIPES = 64
"""Kernel pipes of the process, two descriptors each; a direction has one only while it holds bytes."""


class _Store(Protocol):
    """Holds what one direction has received and not sent."""

    held: int
    """The number of bytes held."""

    def fill(self, source: socket.socket, most: int) -> bool:
        """Receive at most so many bytes into the empty store; False at the end. Raises BlockingIOError."""
        ...

    def drain(self, target: socket.socket) -> None:
        """Send all of it. Raises BlockingIOError when the socket takes no more."""
        ...

    def give_up(self) -> None:
        """It is needed no more."""
        ...


class _KernelPipe:
    def __init__(self) -> None:
        self._exit, self._entry = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.held = 0
        # A user's pipes share a limit, beyond which this one keeps the kernel's default of 64 KiB.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._entry, fcntl.F_SETPIPE_SZ, STORE_BYTES)

    def fill(self, source: socket.socket, most: int) -> bool:
        self.held = os.splice(source.fileno(), self._entry, most, flags=_FLAGS)
        return self.held > 0

    def drain(self, target: socket.socket) -> None:
        while self.held:
            self.held -= os.splice(self._exit, target.fileno(), self.held, flags=_FLAGS)

    def give_up(self) -> None:
        if self.held:
            self.close()
            _made.discard(self)
        else:
            _spare.append(self)

    def close(self) -> None:
        os.close(self._entry)
        os.close(self._exit)


class _Buffer:
    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(STORE_BYTES))
        self._start = self.held = 0

    def fill(self, source: socket.socket, most: int) -> bool:
        self._start, self.held = 0, source.recv_into(self._bytes, most)
        return self.held > 0

    def drain(self, target: socket.socket) -> None:
        while self.held:
            sent = target.send(self._bytes[self._start : self._start + self.held])
            self._start, self.held = self._start + sent, self.held - sent

    def give_up(self) -> None:
        self.held = 0
        if len(_buffers) < _MOST_PIPES:
            _buffers.append(self)


_buffers: list[_Buffer] = []
"""Empty buffers wait here for the next use."""
_made: set[_KernelPipe] = set()
_spare: list[_KernelPipe] = []
"""The empty ones among them."""


def _buffer() -> _Buffer:
    with contextlib.suppress(IndexError):
        return _buffers.pop()
    return _Buffer()


if sys.platform == "linux":
    import fcntl

    os.register_at_fork(after_in_child=_spare.clear)  # or parent and child would share them
    _FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK

    @functools.cache
    def _kernel_moves() -> bool:
        """Whether this kernel does it; some sandboxes have no splice(2)."""
        try:
            pipe = _KernelPipe()
        except OSError:
            return False
        with contextlib.closing(pipe), contextlib.suppress(OSError):
            one, other = socket.socketpair()
            with one, other:
                one.setblocking(False)
                one.send(b"?")
                pipe.fill(other, 1)
                pipe.drain(other)
                return one.recv(1) == b"?"
        return False

    def _store() -> _Store:
        with contextlib.suppress(IndexError):
            return _spare.pop()
        if len(_made) < _MOST_PIPES and _kernel_moves():
            with contextlib.suppress(OSError):  # no descriptor is left
                pipe = _KernelPipe()
                _made.add(pipe)
                return pipe
        return _buffer()

else:

    def _store() -> _Store:
        return _buffer()


async def settled() -> None:
    """Wait until all that pipes were told so far has happened."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    carrier().call_soon_threadsafe(loop.call_soon_threadsafe, done.set_result, None)
    await done


class Pipe:
    """Joins two sockets, once. Create it on an event loop, which calls `on_close` when one of the sockets
    ends by itself. Methods may be called from any thread."""

    def __init__(self, on_close: Callable[[], None], pacer: Pacer | None = None) -> None:
        """`pacer` limits what passes, both ways together; pipes may share one."""
        self.pacer = pacer
        self.carried = 0
        """The bytes carried in both directions together."""
        self._on_close = on_close
        self._owner = asyncio.get_running_loop()
        self._ways: tuple[_Way, ...] = ()
        self._closed = self._aborted = False

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """Pass bytes on from now. Both sockets are connected and do not block; the pipe owns them."""
        carrier().call_soon_threadsafe(self._join, one, other)

    def closed(self) -> None:
        """One end is closed: close the other after its last bytes, within `CLOSE_SECONDS`."""
        carrier().call_soon_threadsafe(self.end)

    def abort(self) -> None:
        """Drop both connections now."""
        carrier().call_soon_threadsafe(self._abort)

    # ---- on the carrier's thread

    def _join(self, one: socket.socket, other: socket.socket) -> None:
        self._ways = _Way(self, one, other), _Way(self, other, one)
        if self._closed or self._aborted:
            self._abort()
            return
        for way in self._ways:
            way.read()

    def end(self) -> None:
        """Do what `closed` does, for the pipe's own directions."""
        if self._closed or self._aborted:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # its owner's loop is over
            self._owner.call_soon_threadsafe(self._on_close)
        for way in self._ways:
            way.stop_reading()
        if self._ways:
            self.sent()
            carrier().call_later(CLOSE_SECONDS, self._abort)

    def sent(self) -> None:
        """A direction holds nothing more. If the pipe is closed, it ends once neither does."""
        if self._closed and not any(way.held for way in self._ways):
            self._abort()

    def _abort(self) -> None:
        self._aborted = True
        ways, self._ways = self._ways, ()
        for way in ways:
            way.end()
        for way in ways:
            way.source.close()


class _Way:
    """One direction."""

    def __init__(self, pipe: Pipe, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self._target = target
        self._pipe = pipe
        self._most = STORE_BYTES if pipe.pacer is None else min(STORE_BYTES, pipe.pacer.piece)
        """The most bytes of one read."""
        self._loop = carrier()
        self._store: _Store | None = None
        """While it holds bytes."""
        self._read_from = 0.0
        """When the pacer allows the next read, by `time.monotonic`."""
        self._over = False
        """Nothing is read any more."""

    @property
    def held(self) -> int:
        return 0 if self._store is None else self._store.held

    def read(self) -> None:
        """Read whenever bytes come."""
        if not self._over:
            self._loop.add_reader(self.source, self._readable)

    def stop_reading(self) -> None:
        if not self._over:
            self._over = True
            self._loop.remove_reader(self.source)

    def end(self) -> None:
        self.stop_reading()
        if self._store is not None:
            self._loop.remove_writer(self._target)
            self._put_back()

    def _readable(self) -> None:
        for _ in range(_TURNS):
            store = self._store = _store()
            try:
                more = store.fill(self.source, self._most)
            except BlockingIOError:
                self._put_back()
                return
            except OSError:
                more = False
            if not more:
                self._put_back()
                self._pipe.end()
                return
            came = store.held
            self._pipe.carried += came
            if self._pipe.pacer is not None:
                now = time.monotonic()
                self._read_from = now + self._pipe.pacer.reserve(store.held, now)
            if not self._send():
                self._loop.remove_reader(self.source)
                self._loop.add_writer(self._target, self._writable)
                return
            if self._over or (came < _SHORT_BYTES and self._pipe.pacer is None):
                return
            if self._pipe.pacer is not None and (wait := self._read_from - time.monotonic()) > 0:
                self._loop.remove_reader(self.source)
                self._loop.call_later(wait, self.read)
                return

    def _writable(self) -> None:
        if not self._send():
            return
        self._loop.remove_writer(self._target)
        if self._over:
            self._pipe.sent()
        else:
            self._loop.call_later(max(0.0, self._read_from - time.monotonic()), self.read)

    def _send(self) -> bool:
        """Send what is held; False if the target takes no more for now."""
        assert self._store is not None
        try:
            self._store.drain(self._target)
        except BlockingIOError:
            return False
        except OSError:
            self._loop.remove_writer(self._target)
            self._put_back()  # nobody takes it
            self._pipe.end()
        else:
            self._put_back()
        return True

    def _put_back(self) -> None:
        if self._store is not None:
            self._store.give_up()
            self._store = None
