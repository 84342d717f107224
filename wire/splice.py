"""Joins two connected sockets: what one receives, the other sends, in bounded memory.

On Linux the bytes stay in the kernel: splice(2) moves them from one socket through a pipe to the other
without a copy. On other systems, and if many directions hold bytes at once, they pass through a buffer of
this process. All this happens on the carrier's thread (`wire.event_loop`), so bytes never wait for the
process's event loop.
"""

import asyncio
import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable

from wire.event_loop import carrier
from wire.pacing import Pacer

CLOSE_SECONDS = 5.0
"""How long the last bytes of a closed connection may take."""
STORE_BYTES = 256 * 1024
"""The most bytes that a direction holds between receiving and sending. Meanwhile it reads nothing more."""
_TURNS = 8
"""How many times a direction reads before the loop's other work gets a turn."""
_SHORT_BYTES = 16 * 1024
"""A shorter read usually took all available bytes, so another read would find nothing."""
_MOST_PIPES = 64
"""The most kernel pipes of the process, with two descriptors each. A direction has one only while it holds
bytes."""


class _KernelPipe:
    """Holds the bytes that a direction has received but not sent, in the kernel."""

    def __init__(self) -> None:
        self._exit, self._entry = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.held = 0
        # A user's pipes share a limit. Beyond it, this pipe keeps the kernel's default of 64 KiB.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._entry, fcntl.F_SETPIPE_SZ, STORE_BYTES)

    def fill(self, source: socket.socket, most: int) -> bool:
        """Receive up to `most` bytes into the empty store. False at the end. Raises BlockingIOError."""
        self.held = os.splice(source.fileno(), self._entry, most, flags=_FLAGS)
        return self.held > 0

    def drain(self, target: socket.socket) -> None:
        """Send all of it. Raises BlockingIOError when the socket takes no more."""
        while self.held:
            self.held -= os.splice(self._exit, target.fileno(), self.held, flags=_FLAGS)

    def give_up(self) -> None:
        if self.held:
            self.close()
            _open.discard(self)
        else:
            _spare.append(self)

    def close(self) -> None:
        os.close(self._entry)
        os.close(self._exit)


class _Buffer:
    """The same in this process's memory."""

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


_Store = _KernelPipe | _Buffer
_buffers: list[_Buffer] = []
"""Empty buffers for reuse."""
_open: set[_KernelPipe] = set()
_spare: list[_KernelPipe] = []
"""The empty pipes among `_open`, for reuse."""


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
        """Whether the kernel supports splice(2), which some sandboxes do not."""
        try:
            pipe = _KernelPipe()
        except OSError:
            return False
        with contextlib.closing(pipe), contextlib.suppress(OSError):
            near, far = socket.socketpair()
            with near, far:
                near.setblocking(False)
                near.send(b"?")
                pipe.fill(far, 1)
                pipe.drain(far)
                return near.recv(1) == b"?"
        return False

    def _store() -> _Store:
        with contextlib.suppress(IndexError):
            return _spare.pop()
        if len(_open) < _MOST_PIPES and _kernel_moves():
            with contextlib.suppress(OSError):  # no descriptor is left
                pipe = _KernelPipe()
                _open.add(pipe)
                return pipe
        return _buffer()

else:

    def _store() -> _Store:
        return _buffer()


async def settled() -> None:
    """Wait until all calls made on pipes so far have taken effect."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    carrier().call_soon_threadsafe(loop.call_soon_threadsafe, done.set_result, None)
    await done


class Pipe:
    """Joins two sockets, once. Create it on an event loop, which calls `on_close` when one of the sockets
    ends or `closed` is called. Any thread may call the methods."""

    def __init__(self, on_close: Callable[[], None], pacer: Pacer | None = None) -> None:
        """`pacer` limits both directions together. Pipes may share one."""
        self.pacer = pacer
        self.carried = 0
        """The bytes carried in both directions together."""
        self._on_close = on_close
        self._owner = asyncio.get_running_loop()
        self._ways: tuple[_Way, ...] = ()
        self._closed = self._aborted = False

    def join(self, left: socket.socket, right: socket.socket) -> None:
        """Start to forward bytes. Both sockets must be connected and non-blocking; the pipe owns them."""
        carrier().call_soon_threadsafe(self._join, left, right)

    def closed(self) -> None:
        """Stop reading, and close both sockets when the held bytes are sent, within `CLOSE_SECONDS`."""
        carrier().call_soon_threadsafe(self.end)

    def abort(self) -> None:
        """Drop both connections now."""
        carrier().call_soon_threadsafe(self._abort)

    # ---- on the carrier's thread

    def _join(self, left: socket.socket, right: socket.socket) -> None:
        self._ways = _Way(self, left, right), _Way(self, right, left)
        if self._closed or self._aborted:
            self._abort()
            return
        for way in self._ways:
            way.read()

    def end(self) -> None:
        """Do what `closed` does, on the carrier's thread."""
        if self._closed or self._aborted:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the owner's loop is closed
            self._owner.call_soon_threadsafe(self._on_close)
        for way in self._ways:
            way.stop_reading()
        if self._ways:
            self.sent()
            carrier().call_later(CLOSE_SECONDS, self._abort)

    def sent(self) -> None:
        """Note that a direction holds no more bytes. A closed pipe ends when neither direction holds any."""
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
        """The most bytes per read."""
        self._loop = carrier()
        self._store: _Store | None = None
        """The store, while it holds bytes."""
        self._read_from = 0.0
        """When the pacer allows the next read, on `time.monotonic`."""
        self._over = False
        """Whether it has stopped reading."""

    @property
    def held(self) -> int:
        return 0 if self._store is None else self._store.held

    def read(self) -> None:
        """Read whenever bytes arrive."""
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
            received = store.held
            self._pipe.carried += received
            if self._pipe.pacer is not None:
                now = time.monotonic()
                self._read_from = now + self._pipe.pacer.reserve(store.held, now)
            if not self._send():
                self._loop.remove_reader(self.source)
                self._loop.add_writer(self._target, self._writable)
                return
            if self._over or (received < _SHORT_BYTES and self._pipe.pacer is None):
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
        """Send the held bytes. Returns False if the target accepts no more for now."""
        assert self._store is not None
        try:
            self._store.drain(self._target)
        except BlockingIOError:
            return False
        except OSError:
            self._loop.remove_writer(self._target)
            self._put_back()  # the target is gone
            self._pipe.end()
        else:
            self._put_back()
        return True

    def _put_back(self) -> None:
        if self._store is not None:
            self._store.give_up()
            self._store = None
