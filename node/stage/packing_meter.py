"""The cost of packing on this node for each codec: from trials before its first step, and from its steps.

Steps show what trials cannot: that compute, or other programs, use the same cores. What slows one codec slows
all that pack in the same way by about the same factor. The factor stays until steps use such a codec again,
so that a codec that proved slow does not seem fast when it is not used.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from node.config.schema import RunConfig
from node.telemetry.clock import WorkKind
from wire.codecs.formats import codec_format
from wire.telemetry import CodecTime, CodecTimes

TOLD_AGAIN = 0.2
"""The relative change of a time from which it is reported again."""
LEAST_TENSORS = 8
"""How many tensors must be packed and unpacked with a family's codecs before its speed is known."""


class PackingMeter:
    """Measures the cost of packing. One thread adds; any thread may read."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tried: dict[str, CodecTime] = {}
        self._factors: dict[str, float] = {}
        self._spent: dict[str, list[tuple[float, float]]] = {}
        """For each family, the seconds of each tensor since the last report, and the expected ones."""
        self._told: dict[str, CodecTime] = {}

    def tried(self, codec: str, pack: float, unpack: float) -> None:
        """Record a trial: without a step beside it, packing took this many seconds per element."""
        with self._lock:
            self._tried[codec] = CodecTime(codec=codec, pack=pack, unpack=unpack)

    @contextmanager
    def spent(self, kind: WorkKind, codec: str, elements: int) -> Iterator[None]:
        """Count the time of the block as work on a tensor of a step."""
        began = time.perf_counter()
        yield
        self.add(kind, codec, elements, time.perf_counter() - began)

    def add(self, kind: WorkKind, codec: str, elements: int, seconds: float) -> None:
        """Record a tensor on which this many seconds were spent; see `spent`."""
        alike = codec_format(codec).family
        with self._lock:
            tried = [known for known in self._tried.values() if codec_format(known.codec).family == alike]
            if tried:
                times = [known.pack if kind is WorkKind.PACK else known.unpack for known in tried]
                expected = elements * sum(times) / len(times)
                self._spent.setdefault(alike, []).append((seconds, expected))

    def news(self) -> CodecTimes | None:
        """The times to report to the coordinator; None if nothing has changed much."""
        with self._lock:
            for alike, tensors in self._spent.items():
                expected = sum(each for _, each in tensors)
                if len(tensors) >= LEAST_TENSORS and expected > 0:
                    self._factors[alike] = sum(seconds for seconds, _ in tensors) / expected
                    tensors.clear()
            now = {name: self._slowed(known) for name, known in self._tried.items()}
            if now.keys() == self._told.keys() and all(map(_alike, now.values(), self._told.values())):
                return None
            self._told = now
            return CodecTimes(times=tuple(now.values()))

    def forget_told(self) -> None:
        """Report everything again, because another process may coordinate the run."""
        with self._lock:
            self._told = {}

    def _slowed(self, known: CodecTime) -> CodecTime:
        factor = self._factors.get(codec_format(known.codec).family, 1.0)
        return CodecTime(codec=known.codec, pack=factor * known.pack, unpack=factor * known.unpack)


def packing_meter(config: RunConfig, device: torch.device) -> PackingMeter | None:
    """The meter of a stage on this device; None if codecs are not planned, or on a GPU, where packing counts
    as free."""
    return PackingMeter() if config.pipeline.plans_codecs and device.type == "cpu" else None


def _alike(time: CodecTime, other: CodecTime) -> bool:
    pairs = (time.pack, other.pack), (time.unpack, other.unpack)
    return all(abs(now - before) <= TOLD_AGAIN * before for now, before in pairs)
