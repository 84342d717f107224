"""A run's recent steps as inputs of the floor model: times a microbatch, bytes a tensor, rates. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from node.analysis.run_view import LinkView, RunView
from node.pipeline.floor import Floor, LinkRate, step_floor
from node.telemetry.clock import TimeKind
from wire.identity.enrolment import CPU

FULL = 0.85
"""A link that carries this share of its measured capacity is full, a stage this busy has no time left. The
page and `top` follow `LinkView.full`; the alert in deploy/prometheus/alerts.yml has the same number."""
FULL_TOGETHER = 0.75
"""Links that take turns are full at less: each is measured while the other is silent, too."""
LITTLE = 0.2
"""A link that carries less than this share of its measured capacity tells nothing of it (`LinkView`)."""
UNLIKE = 1.15
"""Capacities that differ by this factor are not those of two equal links."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """What a step was measured to take. Seconds, bytes, bytes a second."""

    seconds: float
    """Of a step."""
    microbatches: int
    chunks: int
    forward: tuple[float, ...]
    """Of a microbatch on each stage, over all its chunks, without packing."""
    backward: tuple[float, ...]
    packing: tuple[float, ...]
    """Encoding and decoding for a microbatch on each stage."""
    activation_bytes: float
    """A microbatch's packed activation at one boundary, frames included."""
    gradient_bytes: float
    links: tuple[LinkRate, ...]
    """As `step_floor` takes them; a direction whose capacity is not known costs nothing."""
    interfaces: tuple[LinkRate, ...]
    """As `step_floor` takes them: what a stage's links seem to share. Their own capacities count no more."""
    after_seconds: float
    """The optimizer's."""
    elements: Mapping[str, float] = field(default_factory=dict)
    """Of a microbatch's tensor at one boundary, by its direction."""
    slowness: tuple[float, ...] = ()
    """Packing takes each stage so many times what `node.analysis.step_model` says of a core; 0 for a GPU, on
    which it is taken to cost nothing. Empty is not known."""

    @classmethod
    def of(cls, view: RunView) -> Self | None:
        """From the view's recent steps; None before there are any."""
        stages, seconds = len(view.stages), view.step_seconds
        if not stages or not seconds or view.microbatches < 1 or not all(s.shares for s in view.stages):
            return None

        def spent(*kinds: TimeKind) -> tuple[float, ...]:
            return tuple(
                seconds * sum(stage.shares.get(kind.value, 0.0) for kind in kinds) / view.microbatches
                for stage in view.stages
            )

        chunks = view.chunks if stages > 1 else 1
        crossings = view.microbatches * (stages * chunks - 1)

        def tensor_bytes(direction: str) -> float:
            flows = (flow for link in view.links for flow in link.flows if flow.direction == direction)
            return sum(flow.mbit for flow in flows) / 8e-6 * seconds / crossings if crossings else 0.0

        def tensor_elements(direction: str) -> float:
            flows = [flow for link in view.links for flow in link.flows if flow.direction == direction]
            counts = (flow.mbit / flow.bits_per_element for flow in flows if flow.bits_per_element > 0)
            return 1e6 * sum(counts) * seconds / crossings if crossings else 0.0

        optimizer = spent(TimeKind.OPTIMIZER)
        packing = spent(TimeKind.ENCODE, TimeKind.DECODE)
        elements = {direction: tensor_elements(direction) for direction in ("activation", "gradient")}
        uploads = {upload.stage: upload for upload in shared_uploads(view)}
        return cls(
            seconds=seconds,
            microbatches=view.microbatches,
            chunks=chunks,
            forward=spent(TimeKind.FORWARD),
            backward=spent(TimeKind.BACKWARD),
            packing=packing,
            activation_bytes=tensor_bytes("activation"),
            gradient_bytes=tensor_bytes("gradient"),
            links=_rates([link for link in view.links if link.source not in uploads], stages, chunks),
            interfaces=tuple(
                LinkRate(up=uploads[stage].capacity_mbit / 8e-6 if stage in uploads else math.inf)
                for stage in range(stages)
            ),
            after_seconds=max(optimizer) * view.microbatches,
            elements=elements,
            slowness=_slowness(view, chunks, elements, packing),
        )

    @property
    def microbatch_seconds(self) -> float:
        """Of the step, if it were all microbatches."""
        return self.seconds / self.microbatches

    def floor(self) -> Floor:
        """The least time that a step of these times and bytes can take."""
        half = [packing / 2 for packing in self.packing]
        return step_floor(
            microbatches=self.microbatches,
            forward=[time + extra for time, extra in zip(self.forward, half, strict=True)],
            backward=[time + extra for time, extra in zip(self.backward, half, strict=True)],
            activation_bytes=self.activation_bytes,
            gradient_bytes=self.gradient_bytes,
            links=self.links,
            interfaces=self.interfaces,
            chunks=self.chunks,
            after_seconds=self.after_seconds,
        )

    def gain(self, changed: "StepModel") -> float:
        """How many times as fast steps would be with `changed` times and bytes.

        What a step takes beyond its floor is taken to stay.
        """
        floor = self.floor().seconds
        # Measured capacities can make a floor that is above the step itself.
        now = max(self.seconds, floor)
        then = changed.floor().seconds + now - floor
        return now / then if then > 0 else 1.0

    def with_codecs(
        self, *, activation: float = 1.0, gradient: float = 1.0, packing: Sequence[float] = ()
    ) -> "StepModel":
        """Tensors of each kind take so many times their bytes, and `packing` seconds more at each stage."""
        more = packing or (0.0,) * len(self.packing)
        return replace(
            self,
            activation_bytes=activation * self.activation_bytes,
            gradient_bytes=gradient * self.gradient_bytes,
            packing=tuple(now + extra for now, extra in zip(self.packing, more, strict=True)),
        )

    def more_packing(self, codecs: Mapping[str, tuple[str, str]]) -> tuple[float, ...]:
        """Seconds a microbatch that packing takes each stage longer with other codecs: 0 on GPUs.

        `codecs`: the present one and the other, by direction. A codec that is quicker saves nothing: its
        packing ran beside compute.
        """
        costs = {}
        for direction, (present, other) in codecs.items():
            pairs = zip(nanoseconds(present), nanoseconds(other), strict=True)
            encode, decode = (max(0.0, after - before) for before, after in pairs)
            costs[direction] = encode, decode
        on_a_core = packing_seconds(len(self.forward), self.chunks, self.elements, costs)
        slowness = self.slowness or (0.0,) * len(on_a_core)
        return tuple(slow * seconds for slow, seconds in zip(slowness, on_a_core, strict=True))

    def with_blocks(self, before: Sequence[float], after: Sequence[float]) -> "StepModel":
        """Stages compute other numbers of blocks; a block takes its stage as long as before."""
        factors = [new / old for old, new in zip(before, after, strict=True)]
        return replace(
            self,
            forward=tuple(time * factor for time, factor in zip(self.forward, factors, strict=True)),
            backward=tuple(time * factor for time, factor in zip(self.backward, factors, strict=True)),
        )

    def without_packing(self) -> "StepModel":
        """Encoding and decoding take no time."""
        return replace(self, packing=(0.0,) * len(self.packing))


@dataclass(frozen=True, kw_only=True)
class SharedUpload:
    """Several links of one stage that seem to share what the stage can send."""

    stage: int
    links: tuple[LinkView, ...]
    mbit: float
    """What they carry together, Mbit/s."""
    capacity_mbit: float
    """What the upload carries at most."""


def shared_uploads(view: RunView) -> tuple[SharedUpload, ...]:
    """The stages whose links away are all full at once, at rates that differ.

    Links that share an upload share it while both have something to send, so each is measured at a part of
    it, as large as its part of the bytes. Links of their own that are full at once are so by chance, unless
    they are alike; those are left alone.
    """
    found = []
    for stage in range(len(view.stages)):
        links = tuple(x for x in view.links if x.source == stage and x.use is not None and x.mbit > 0)
        uses = [link.use or 0.0 for link in links]
        if len(links) < 2 or min(uses) < FULL_TOGETHER:
            continue
        capacities = [link.capacity_mbit for link in links]
        if max(capacities) < UNLIKE * min(capacities):
            continue
        sent = sum(link.mbit for link in links)
        found.append(SharedUpload(stage=stage, links=links, mbit=sent, capacity_mbit=sent / max(uses)))
    return tuple(found)


def full_links(view: RunView) -> set[tuple[int, int]]:
    """Which links are full, as source and target: by themselves, or because they share an upload."""
    alone = {(link.source, link.target) for link in view.links if (link.use or 0.0) >= FULL}
    return alone | {(x.source, x.target) for upload in shared_uploads(view) for x in upload.links}


def _slowness(
    view: RunView, chunks: int, elements: Mapping[str, float], packing: Sequence[float]
) -> tuple[float, ...]:
    """As `StepModel.slowness`. Stages report what compute waits for packing, which is a part of it; so a
    stage that waits for longer than all of it should take is slower than the core that was measured."""
    flows = (flow for link in view.links for flow in link.flows if flow.direction in elements)
    costs = {flow.direction: nanoseconds(flow.codec) for flow in flows}
    expected = packing_seconds(len(view.stages), chunks, elements, costs)
    return tuple(
        max(1.0, told / should if should > 0 else 1.0) if is_processor(stage.device) else 0.0
        for stage, told, should in zip(view.stages, packing, expected, strict=True)
    )


def _rates(links: Sequence[LinkView], stages: int, chunks: int) -> tuple[LinkRate, ...]:
    by_pair = {(link.source, link.target): link for link in links}

    def rate(source: int, target: int) -> float:
        link = by_pair.get((source, target))
        return link.capacity_mbit / 8e-6 if link is not None and link.capacity_mbit > 0 else math.inf

    def latency(source: int, target: int) -> float:
        both = (by_pair.get((source, target)), by_pair.get((target, source)))
        round_trips = [link.round_trip_seconds for link in both if link is not None]
        return min(round_trips, default=0.0) / 2

    joints = [(stage, stage + 1) for stage in range(stages - 1)]
    if chunks > 1 and stages > 2:
        joints.append((stages - 1, 0))
    return tuple(
        LinkRate(up=rate(low, high), down=rate(high, low), latency=latency(low, high)) for low, high in joints
    )


PROCESSOR_NANOSECONDS: Mapping[str, tuple[float, float]] = {
    "fp32": (1.7, 1.7),
    "bf16": (0.8, 1.1),
    "fp16": (6.1, 6.9),
    "fixed": (4.2, 2.0),
    "tah": (6.3, 2.2),
    "trellis": (71.3, 18.7),
}
"""To encode and to decode an element on one core, by the codec's name without its number: as measured, and of
several measurements the slowest (scripts/results/codec_speed.json, rivals.json)."""


def nanoseconds(codec: str) -> tuple[float, float]:
    """Of an element, encoded and decoded. A codec that is not known takes what `fixed` does."""
    family = codec.partition("-")[0]
    return PROCESSOR_NANOSECONDS.get(family, PROCESSOR_NANOSECONDS["fixed"])


def packing_seconds(
    stages: int, chunks: int, elements: Mapping[str, float], costs: Mapping[str, tuple[float, float]]
) -> tuple[float, ...]:
    """What packing takes a microbatch at each of so many stages, on one core.

    Args:
        chunks: model chunks a stage; a tensor crosses between any two that follow each other.
        elements: of a tensor between two chunks, by its direction: `activation` or `gradient`.
        costs: nanoseconds an element, to encode and to decode, by direction.
    """
    seconds = [0.0] * stages
    for direction, (encode, decode) in costs.items():
        forward = direction == "activation"
        for stage in range(stages):
            # The last chunk has no activation to send, the first none to receive; gradients the other way.
            as_last, as_first = chunks - (stage == stages - 1), chunks - (stage == 0)
            sent, received = (as_last, as_first) if forward else (as_first, as_last)
            seconds[stage] += 1e-9 * elements.get(direction, 0.0) * (sent * encode + received * decode)
    return tuple(seconds)


def is_processor(device: str) -> bool:
    """Whether a node's device, as it told it, packs at a processor's speed."""
    return device == CPU
