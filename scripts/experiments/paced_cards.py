"""Cards that compute nothing: a process that says when work of a set length would be done on a shared card.

Several processes on one GPU take turns: each has the card for a slice of time, or until it has no work left.
Within a slice the streams of a process run beside each other. `serve` plays that for any number of cards;
`Card` is one process's side, and `CardTransfer` a node's device on it.
"""

import json
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.stage.device_transfer import DeviceTransfer
from wire.codecs.base import Codec
from wire.spec import TensorSpec

COMPUTE, PACK, UNPACK = range(3)
"""Streams."""


class _Client:
    """A process on a card. Its card's condition guards it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._streams: dict[int, deque[list[float]]] = {}
        """Jobs in order: number, seconds left, number of the job that comes before on any stream."""
        self._done: set[float] = {-1}

    def add(self, stream: int, number: int, seconds: float, after: int) -> None:
        self._streams.setdefault(stream, deque()).append([number, seconds, after])

    def runnable(self) -> list[deque[list[float]]]:
        return [jobs for jobs in self._streams.values() if jobs and jobs[0][2] in self._done]

    def ran(self, seconds: float) -> None:
        """Its streams have shared the card for so long."""
        running = self.runnable()
        for jobs in running:
            jobs[0][1] -= seconds / len(running)
        for jobs in running:
            if jobs[0][1] <= 1e-6:
                number = jobs.popleft()[0]
                self._done.add(number)
                self._connection.sendall(json.dumps(number).encode() + b"\n")


class _SharedCard:
    """Processes take turns of `slice_seconds`; `switch_seconds` go by when another one's begins."""

    def __init__(self, slice_seconds: float, switch_seconds: float) -> None:
        self._slice, self._switch = slice_seconds, switch_seconds
        self._changed = threading.Condition()
        self._clients: list[_Client] = []

    def join(self, client: _Client) -> None:
        with self._changed:
            self._clients.append(client)

    def add(self, client: _Client, *job: Any) -> None:
        with self._changed:
            client.add(*job)
            self._changed.notify()

    def run(self) -> None:
        last = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(one.runnable() for one in self._clients))
                # From the one after the last on.
                order = [(last + 1 + one) % len(self._clients) for one in range(len(self._clients))]
                turn = next(one for one in order if self._clients[one].runnable())
            if turn != last:
                time.sleep(self._switch)
            with self._changed:
                self._take_turn(self._clients[turn])
                last = turn

    def _take_turn(self, client: _Client) -> None:
        now = time.perf_counter()
        end = now + self._slice
        while (running := client.runnable()) and now < end:
            shortest = len(running) * min(jobs[0][1] for jobs in running)
            # A new job of the process ends the wait.
            self._changed.wait(min(shortest, end - now))
            began, now = now, time.perf_counter()
            client.ran(now - began)


def serve(path: Path, cards: int, slice_seconds: float, switch_seconds: float) -> None:
    """Until the process is ended: client i is on card i modulo `cards`."""
    found = [_SharedCard(slice_seconds, switch_seconds) for _ in range(cards)]
    for card in found:
        threading.Thread(target=card.run, daemon=True).start()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        number = 0
        while True:
            connection, _ = door.accept()
            arguments = (connection, found[number % cards])
            threading.Thread(target=_listen, args=arguments, daemon=True).start()
            number += 1


def _listen(connection: socket.socket, card: _SharedCard) -> None:
    client = _Client(connection)
    card.join(client)
    for line in connection.makefile():
        card.add(client, *json.loads(line))


class Card:
    """This process's share of a card."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._lock = threading.Lock()
        self._number = 0
        self._done: dict[int, threading.Event] = {}
        self.waiting = 0.0
        """Seconds of compute that no mark follows yet."""
        threading.Thread(target=self._listen, daemon=True).start()

    def submit(self, stream: int, seconds: float, after: int = -1) -> int:
        """The number of a job of so many seconds."""
        with self._lock:
            self._number += 1
            self._done[self._number] = threading.Event()
            self._socket.sendall(json.dumps([stream, self._number, seconds, after]).encode() + b"\n")
            return self._number

    def wait(self, number: int) -> None:
        self._done[number].wait()

    def _listen(self) -> None:
        for line in self._socket.makefile():
            self._done[json.loads(line)].set()


class CardMark:
    """After a job."""

    def __init__(self, card: Card, number: int) -> None:
        self._card = card
        self.number = number

    def synchronize(self) -> None:
        self._card.wait(self.number)


class CardTransfer(DeviceTransfer):
    """Tensors are on the host; the work of a card goes before what the codec does here."""

    def __init__(self, card: Card, pack: float, unpack: float) -> None:
        """
        Args:
            pack, unpack: the card's seconds for a tensor.
        """
        self._card = card
        self._pack, self._unpack = pack, unpack

    def mark(self) -> CardMark:
        seconds, self._card.waiting = self._card.waiting, 0.0
        return CardMark(self._card, self._card.submit(COMPUTE, seconds))

    def wait(self, tensor: Tensor, mark: Any) -> None:
        """Unpacked tensors are there."""

    def pack(self, codec: Codec, tensor: Tensor, mark: Any) -> Tensor:
        self._card.wait(self._card.submit(PACK, self._pack, -1 if mark is None else mark.number))
        return codec.encode(tensor)

    def unpack(self, codec: Codec, packed: Tensor, spec: TensorSpec) -> tuple[Tensor, None]:
        found = codec.open(packed.numpy(), spec)
        self._card.wait(self._card.submit(UNPACK, self._unpack))
        return codec.unpack(packed, spec, found, torch.empty(spec.shape, dtype=spec.dtype)), None
