"""The lower bound of a step: the least time in which its compute and its bytes can be done. All functions are
pure.

Every resource of a pipeline (a stage's compute, a direction of a link, a direction of a node's network
interface) serves each microbatch for a known time, one at a time. No schedule, however wide its window, can
start at a resource before the first microbatch has reached it, or end before the last one has left it and
gone the rest of its way. So for every resource a step takes at least

    fill (to the resource) + microbatches x time per microbatch + drain (from it to the end of the step)

and the largest of these is the bound. Per microbatch it is max(compute, bytes over the busiest link direction
/ its rate), and the unavoidable fill and drain are added.

If microbatches are cut into N slices of equal work, fill and drain are those of the first slice: each
resource serves N times as many tensors for 1 / N of the time. A slice's bytes are assumed to be 1 / N too.
The slices with the most tokens have more, and they are the first and last on their way, so the result is
still a lower bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """The rates of a wire: one link between two stages, or one node's network interface.

    Bytes are those of frames, so rates are those of payload, without Ethernet, IP and TCP headers (0.956 of
    the nominal rate with 1500-byte packets).
    """

    up: float = math.inf
    """Bytes per second, on a link from the lower stage to the higher, on an interface out of the node."""
    down: float = math.inf
    """Bytes per second in the other direction."""
    latency: float = 0.0
    """Seconds in one direction. An interface's latency is added to every tensor that passes it."""


class ResourceKind(StrEnum):
    """The kinds of resources, each of which may be the bottleneck."""

    COMPUTE = "compute"
    LINK = "link"
    INTERFACE = "interface"


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A resource that serves one microbatch at a time."""

    kind: ResourceKind
    stage: int
    """The stage that computes, that owns the interface, or that sends over the link."""
    peer_stage: int = -1
    """The stage that receives over the link; else -1."""
    direction: str = ""
    """The direction of a link or an interface, `up` or `down`, as in `LinkRate`."""

    def __str__(self) -> str:
        match self.kind:
            case ResourceKind.COMPUTE:
                return f"compute of stage {self.stage}"
            case ResourceKind.LINK:
                return f"link {self.stage} to {self.peer_stage}"
            case _:
                word = {"up": "upload", "down": "download"}[self.direction]
                return f"{word} of stage {self.stage}"


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A tensor's way through the network. All parts of the way serve it at once, because bytes stream
    through."""

    seconds: Mapping[Resource, float]
    """The seconds for which it occupies each part."""
    latency: float
    """The seconds from the end of the slowest part's service to its arrival."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of a resource in a step."""

    resource: Resource
    microbatch_seconds: float
    """The seconds for which it serves each microbatch."""
    fill_seconds: float
    """The seconds before the first microbatch can reach it."""
    drain_seconds: float
    """The seconds from its last microbatch to the end of the step."""

    def seconds(self, microbatches: int) -> float:
        """The lower bound of a step with this many microbatches, because of this resource alone."""
        return self.fill_seconds + microbatches * self.microbatch_seconds + self.drain_seconds


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The lower bound of a step, and the resource that determines it."""

    seconds: float
    """The bound for the whole step."""
    binds: Resource
    """The resource that determines the bound. No schedule can relieve it."""
    microbatch_seconds: float
    """The seconds for which `binds` serves each microbatch. The rest of `seconds` is fill, drain and what
    follows."""

    def share(self, measured_seconds: float) -> float:
        """The bound divided by the measured seconds of a step; 1 is perfect."""
        return self.seconds / measured_seconds


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """What one step computes and sends, and through which links."""

    microbatches: int
    """Those of the step, at least 1."""
    forward: tuple[float, ...]
    """The seconds of one microbatch's forward on each stage, over all its chunks. They include encoding and
    decoding unless these are hidden."""
    backward: tuple[float, ...]
    """The same for backward."""
    activation_bytes: float = 0.0
    """A microbatch's packed activation at one boundary, with frames."""
    gradient_bytes: float = 0.0
    """The same for its gradient."""
    links: tuple[LinkRate, ...] = ()
    """One for each pair of `joints`; `up` is from its first stage. Without links, transfers cost nothing."""
    interfaces: tuple[LinkRate, ...] = ()
    """Each stage's network interface, which all its links share. Without interfaces there is no such
    limit."""
    chunks: int = 1
    """Model chunks per stage (`node.schedule.schedule`)."""
    head_share: float | None = None
    """The share of the first stage's time that the head takes there; None if the last chunk has it."""
    after_seconds: float = 0.0
    """What every step needs after its last backward: the vote, the commit and the optimizer."""
    slices: int = 1

    def floor(self) -> Floor:
        """The lower bound of the step's time.

        Raises:
            ValueError: sizes do not agree, times are negative, or rates are not above 0.
        """
        stages, forward, backward = len(self.forward), self.forward, self.backward
        if stages == 0 or len(backward) != stages or min(self.microbatches, self.chunks, self.slices) < 1:
            raise ValueError(
                "give forward and backward for every stage, and at least 1 microbatch, chunk and slice"
            )
        wanted = len(joints(stages, closes=self.chunks > 1 or self.head_share is not None))
        if self.links and len(self.links) != wanted:
            raise ValueError(
                f"{len(self.links)} links given; {stages} stages with {self.chunks} chunks have {wanted}"
            )
        if self.interfaces and len(self.interfaces) != stages:
            raise ValueError(f"{len(self.interfaces)} interfaces given for {stages} stages")
        if min(*forward, *backward, self.activation_bytes, self.gradient_bytes, self.after_seconds) < 0:
            raise ValueError("times and bytes cannot be negative")
        if any(min(r.up, r.down) <= 0 or r.latency < 0 for r in (*self.links, *self.interfaces)):
            raise ValueError("rates must be above 0 and latencies not below")

        visits, slices = _Visits(Network(stages, self.links, self.interfaces)), self.slices
        hops = stages * self.chunks + (self.head_share is not None)
        shares = chunk_shares(stages, self.chunks, self.head_share)
        for hop in range(hops):
            visits.compute(hop % stages, forward[hop % stages] * shares[hop] / slices)
            if hop < hops - 1:
                visits.transfer(hop % stages, (hop + 1) % stages, self.activation_bytes / slices)
        for hop in reversed(range(hops)):
            visits.compute(hop % stages, backward[hop % stages] * shares[hop] / slices)
            if hop > 0:
                visits.transfer(hop % stages, (hop - 1) % stages, self.gradient_bytes / slices)
        loads = [
            replace(load, microbatch_seconds=slices * load.microbatch_seconds) for load in visits.loads()
        ]
        first = max(loads, key=lambda load: load.seconds(self.microbatches))
        return Floor(
            seconds=first.seconds(self.microbatches) + self.after_seconds,
            binds=first.resource,
            microbatch_seconds=first.microbatch_seconds,
        )


def joints(stages: int, *, closes: bool) -> list[tuple[int, int]]:
    """The pairs of stages that a link joins: neighbours, and the last and the first of three or more if the
    line `closes` to a ring, as with several chunks or a head on the first."""
    return [
        *((stage, stage + 1) for stage in range(stages - 1)),
        *[(stages - 1, 0)] * (closes and stages > 2),
    ]


def chunk_shares(stages: int, chunks: int, head_share: float | None = None) -> tuple[float, ...]:
    """The share of its stage's time that each global chunk takes. If the head has its own chunk, it is the
    last."""
    if head_share is None:
        return (1 / chunks,) * (stages * chunks)
    blocks = ((1 - head_share) / chunks, *((1 / chunks,) * (stages - 1)))
    return (*(blocks * chunks), head_share)


class Network:
    """The links between stages and the interfaces of their nodes, which tensors occupy."""

    def __init__(self, stages: int, links: Sequence[LinkRate], interfaces: Sequence[LinkRate] = ()) -> None:
        """The arguments are those of `PipelineStep`."""
        self._stages = stages
        self._links = links
        self._interfaces = interfaces

    def passage(self, source: int, target: int, size: float) -> Passage:
        """The passage of `size` bytes between two stages that a link joins."""
        # The link that closes the ring starts at the last stage. Two stages have only one link.
        closing = {source, target} == {0, self._stages - 1} and self._stages > 2
        low = max(source, target) if closing else min(source, target)
        seconds: dict[Resource, float] = {}
        latency = 0.0
        if self._links:
            link = self._links[low]
            upward = source == low
            direction = "up" if upward else "down"
            way = Resource(kind=ResourceKind.LINK, stage=source, peer_stage=target, direction=direction)
            seconds[way] = size / (link.up if upward else link.down)
            latency += link.latency
        if self._interfaces:
            for stage, direction in ((source, "up"), (target, "down")):
                interface = self._interfaces[stage]
                resource = Resource(kind=ResourceKind.INTERFACE, stage=stage, direction=direction)
                seconds[resource] = size / (interface.up if direction == "up" else interface.down)
                latency += interface.latency
        return Passage(seconds=seconds, latency=latency)


@dataclass
class _Visit:
    """A microbatch at a resource. `begin` and `end` are counted from the start of its way through the
    pipeline."""

    begin: float
    seconds: float
    end: float


class _Visits:
    """One microbatch's way there and back, alone in the pipeline: where it is served, from when and for how
    long."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._now = 0.0
        self._by_resource: dict[Resource, list[_Visit]] = {}

    def compute(self, stage: int, seconds: float) -> None:
        self._serve({Resource(kind=ResourceKind.COMPUTE, stage=stage): seconds}, 0.0)

    def transfer(self, source: int, target: int, size: float) -> None:
        if source != target:
            passage = self._network.passage(source, target, size)
            self._serve(passage.seconds, passage.latency)

    def _serve(self, served: Mapping[Resource, float], latency: float) -> None:
        for resource, seconds in served.items():
            if seconds > 0:
                visit = _Visit(self._now, seconds, self._now + seconds)
                self._by_resource.setdefault(resource, []).append(visit)
        self._now += max(served.values(), default=0.0) + latency

    def loads(self) -> list[Load]:
        if not self._by_resource:
            return [
                Load(
                    resource=Resource(kind=ResourceKind.COMPUTE, stage=0),
                    microbatch_seconds=0.0,
                    fill_seconds=self._now,
                    drain_seconds=0.0,
                )
            ]
        return [
            Load(
                resource=resource,
                microbatch_seconds=sum(visit.seconds for visit in visits),
                fill_seconds=min(visit.begin for visit in visits),
                drain_seconds=self._now - max(visit.end for visit in visits),
            )
            for resource, visits in self._by_resource.items()
        ]
