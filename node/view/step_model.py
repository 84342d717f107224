"""Models a run's recent steps for the lower bound on step time: times, bytes, rates, cost of packing. All
functions are pure."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from node.schedule.floor import Floor, LinkRate, PipelineStep, joints
from node.telemetry.clock import TimeKind
from node.view.run_view import LinkView, RunView
from wire.codecs.formats import codec_format
from wire.identity.enrolment import CPU

FULL = 0.85
"""A link at this share of its measured capacity is full; a stage with this share of busy time has no time
left. The alert in deploy/prometheus/alerts.yml uses the same number."""
FULL_TOGETHER = 0.75
"""Links that share an upload are full if their bytes divided by the sum of their capacities are this share.

It is lower than `FULL`, because each link is also measured while the others are silent.
"""
EACH_TOGETHER = 0.6
"""The least share for each of the links that share an upload."""
BY_PROGRAM = 0.8
"""If the sender of a full link computes for this share of the time with data, its processor is the limit."""
LITTLE = 0.2
"""Below this share of the measured capacity, the measurement is unreliable (`LinkView.little_used`)."""
UNLIKE = 1.15
"""Links whose capacities differ by this factor do not count as equal."""


@dataclass(frozen=True, kw_only=True)
class StepModel(PipelineStep):
    """The measurements of a step. `forward` and `backward` are without packing.

    A direction of a link whose capacity is unknown costs nothing. Uploads that a stage's links seem to share
    are among `interfaces`, in place of the links' capacities.
    """

    seconds: float
    packing: tuple[float, ...]
    """Encoding and decoding for a microbatch on each stage."""
    elements: Mapping[str, float] = field(default_factory=dict)
    """The elements of a microbatch's tensor at one boundary, by direction."""
    slowness: tuple[float, ...] = ()
    """Each stage's packing time divided by `packing_seconds`; 0 for GPUs, where packing is assumed to be
    free. It is empty if unknown."""

    @classmethod
    def of(cls, view: RunView) -> Self | None:
        """The model of the view's recent steps; None before there are any."""
        stages, seconds = len(view.stages), view.step_seconds
        if not stages or not seconds or view.microbatches < 1 or not all(s.shares for s in view.stages):
            return None

        def spent(*kinds: TimeKind) -> tuple[float, ...]:
            return tuple(
                seconds * sum(stage.shares.get(kind.value, 0.0) for kind in kinds) / view.microbatches
                for stage in view.stages
            )

        chunks = view.chunks if stages > 1 else 1
        share = view.head_share if stages > 1 else None
        crossings = view.microbatches * (stages * chunks - 1 + (share is not None))

        def tensor_bytes(direction: str) -> float:
            flows = (flow for link in view.links for flow in link.flows if flow.kind == direction)
            return sum(flow.mbit for flow in flows) / 8e-6 * seconds / crossings if crossings else 0.0

        def tensor_elements(direction: str) -> float:
            flows = [flow for link in view.links for flow in link.flows if flow.kind == direction]
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
            slices=view.slices,
            forward=spent(TimeKind.FORWARD),
            backward=spent(TimeKind.BACKWARD),
            packing=packing,
            activation_bytes=tensor_bytes("activation"),
            gradient_bytes=tensor_bytes("gradient"),
            links=_rates(
                [link for link in view.links if link.source not in uploads],
                joints(stages, closes=chunks > 1 or share is not None),
            ),
            interfaces=tuple(
                LinkRate(up=uploads[stage].capacity_mbit / 8e-6 if stage in uploads else math.inf)
                for stage in range(stages)
            ),
            after_seconds=max(optimizer) * view.microbatches,
            head_share=share,
            elements=elements,
            slowness=_slowness(view, chunks, elements, packing),
        )

    @property
    def microbatch_seconds(self) -> float:
        """Step time / microbatches."""
        return self.seconds / self.microbatches

    def floor(self) -> Floor:
        """The lower bound on the step's time. Half of the packing counts as forward, half as backward."""
        half = [packing / 2 for packing in self.packing]
        with_packing = replace(
            self,
            forward=tuple(time + extra for time, extra in zip(self.forward, half, strict=True)),
            backward=tuple(time + extra for time, extra in zip(self.backward, half, strict=True)),
        )
        return PipelineStep.floor(with_packing)

    def gain(self, changed: "StepModel") -> float:
        """Step time / step time of the `changed` model. Time beyond the lower bound stays."""
        floor = self.floor().seconds
        # By measured capacities the bound may exceed the step itself.
        now = max(self.seconds, floor)
        then = changed.floor().seconds + now - floor
        return now / then if then > 0 else 1.0

    def with_codecs(
        self, *, activation: float = 1.0, gradient: float = 1.0, packing: Sequence[float] = ()
    ) -> "StepModel":
        """Scale the bytes of each kind of tensor, and add `packing` seconds per microbatch at each stage."""
        more = packing or (0.0,) * len(self.packing)
        return replace(
            self,
            activation_bytes=activation * self.activation_bytes,
            gradient_bytes=gradient * self.gradient_bytes,
            packing=tuple(now + extra for now, extra in zip(self.packing, more, strict=True)),
        )

    def more_packing(self, codecs: Mapping[str, tuple[str, str]]) -> tuple[float, ...]:
        """The extra seconds per microbatch for packing at each stage with other codecs; 0 on GPUs.

        A faster codec saves nothing, because packing runs beside compute.

        Args:
            codecs: the present and the proposed codec, by direction.
        """
        costs = {}
        for direction, (present, other) in codecs.items():
            pairs = zip(
                codec_format(present).core_nanoseconds, codec_format(other).core_nanoseconds, strict=True
            )
            encode, decode = (max(0.0, after - before) for before, after in pairs)
            costs[direction] = encode, decode
        head_first = self.head_share is not None
        on_a_core = packing_seconds(
            len(self.forward), self.chunks, self.elements, costs, head_first=head_first
        )
        slowness = self.slowness or (0.0,) * len(on_a_core)
        return tuple(slow * seconds for slow, seconds in zip(slowness, on_a_core, strict=True))

    def with_blocks(self, before: Sequence[float], after: Sequence[float]) -> "StepModel":
        """Change the number of blocks of each stage. The time per block stays."""
        factors = [new / old for old, new in zip(before, after, strict=True)]
        return replace(
            self,
            forward=tuple(time * factor for time, factor in zip(self.forward, factors, strict=True)),
            backward=tuple(time * factor for time, factor in zip(self.backward, factors, strict=True)),
        )

    def without_packing(self) -> "StepModel":
        """Assume that encoding and decoding take no time."""
        return replace(self, packing=(0.0,) * len(self.packing))


@dataclass(frozen=True, kw_only=True)
class SharedUpload:
    """The links of one stage that seem to share its upload."""

    stage: int
    links: tuple[LinkView, ...]
    mbit: float
    """Their total in Mbit/s."""
    capacity_mbit: float
    """The estimated capacity of the upload in Mbit/s."""


def shared_uploads(view: RunView) -> tuple[SharedUpload, ...]:
    """The stages whose outgoing links are full at the same time, at different rates.

    In the middle of a pipeline a node sends activations in one direction and gradients in the other, perhaps
    on one line. Links on one upload share it while both send, so each is measured at its share of the bytes.
    Links with equal capacities are more likely separate links that are full at the same time.
    """
    uploads = []
    by_source: defaultdict[int, list[LinkView]] = defaultdict(list)
    for link in view.links:
        if link.use is not None and link.mbit > 0 and 0 <= link.source < len(view.stages):
            by_source[link.source].append(link)
    for stage, links in sorted(by_source.items()):
        uses = [link.use or 0.0 for link in links]
        if len(links) < 2 or min(uses) < EACH_TOGETHER:
            continue
        capacities = [link.capacity_mbit for link in links]
        # A link that is measured above its capacity counts as full.
        sent_at_most = sum(use * capacity for use, capacity in zip(uses, capacities, strict=True))
        if sent_at_most < FULL_TOGETHER * sum(capacities):
            continue
        if max(capacities) < UNLIKE * min(capacities):
            continue
        sent = sum(link.mbit for link in links)
        uploads.append(
            SharedUpload(stage=stage, links=tuple(links), mbit=sent, capacity_mbit=sent / max(uses))
        )
    return tuple(uploads)


def full_links(view: RunView) -> set[tuple[int, int]]:
    """(source, target) of full links: links that are full by themselves, or because they share an upload."""
    alone = {(link.source, link.target) for link in view.links if (link.use or 0.0) >= FULL}
    return alone | {(x.source, x.target) for upload in shared_uploads(view) for x in upload.links}


def _slowness(
    view: RunView, chunks: int, elements: Mapping[str, float], packing: Sequence[float]
) -> tuple[float, ...]:
    """The value of `StepModel.slowness`. Reported packing time is only the part for which compute waits. If
    even that exceeds the expected time, the stage is slower than the measured core."""
    flows = (flow for link in view.links for flow in link.flows if flow.kind in elements)
    costs = {flow.kind: codec_format(flow.codec).core_nanoseconds for flow in flows}
    head_first = view.head_share is not None and len(view.stages) > 1
    expected = packing_seconds(len(view.stages), chunks, elements, costs, head_first=head_first)
    return tuple(
        max(1.0, told / should if should > 0 else 1.0) if stage.device == CPU else 0.0
        for stage, told, should in zip(view.stages, packing, expected, strict=True)
    )


def _rates(links: Sequence[LinkView], pairs: Sequence[tuple[int, int]]) -> tuple[LinkRate, ...]:
    by_pair = {(link.source, link.target): link for link in links}

    def rate(source: int, target: int) -> float:
        link = by_pair.get((source, target))
        return link.capacity_mbit / 8e-6 if link is not None and link.capacity_mbit > 0 else math.inf

    def latency(source: int, target: int) -> float:
        both = (by_pair.get((source, target)), by_pair.get((target, source)))
        round_trips = [link.round_trip_seconds for link in both if link is not None]
        return min(round_trips, default=0.0) / 2

    return tuple(
        LinkRate(up=rate(low, high), down=rate(high, low), latency=latency(low, high)) for low, high in pairs
    )


def packing_seconds(
    stages: int,
    chunks: int,
    elements: Mapping[str, float],
    costs: Mapping[str, tuple[float, float]],
    *,
    head_first: bool = False,
) -> tuple[float, ...]:
    """The packing time of a microbatch at each stage, on one core.

    Args:
        chunks: model chunks per stage. A tensor crosses between consecutive chunks.
        elements: the elements of a tensor between two chunks, by direction (`activation`, `gradient`).
        costs: nanoseconds to encode and to decode an element, by direction.
        head_first: the head is one more chunk, on the first stage.
    """
    seconds = [0.0] * stages
    for direction, (encode, decode) in costs.items():
        forward = direction == "activation"
        for stage in range(stages):
            # The last chunk sends no activation and the first receives none; for gradients it is the reverse.
            # A head's chunk on the first stage is the last chunk, and receives what the stage of the last
            # block sends.
            as_last = chunks - (stage == stages - 1 and not head_first)
            as_first = chunks - (stage == 0 and not head_first)
            sent, received = (as_last, as_first) if forward else (as_first, as_last)
            seconds[stage] += 1e-9 * elements.get(direction, 0.0) * (sent * encode + received * decode)
    return tuple(seconds)
