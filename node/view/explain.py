"""Computes what a run file means before anything starts: stages, memory, bytes per step on each link, the
text.

Bytes are counted with the code that a run uses: codec sizes, frame headers, the split and the schedule. They
are the bytes of frames; gRPC, TLS and acknowledgements add to them.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil, prod

from node.config.schema import RunConfig
from node.data.samples import held_out_samples
from node.data.shards import ShardedCorpus, load_data
from node.model.storage import Storage, stored_bytes
from node.model.units import unit_parameters
from node.schedule.gradient_groups import RowShare, sync_bytes
from node.schedule.placement import (
    boundaries,
    boundary_cache_bytes,
    boundary_shapes,
    check_cache,
    head_bytes,
    head_first,
    stage_cache_bytes,
    stage_orders,
    stage_units,
)
from node.schedule.routing import source_stage, target_stage
from node.schedule.schedule import held_activations
from node.tuning.device_memory import Devices
from node.tuning.memory import pass_model, stage_memory, stage_storages
from wire.codecs.formats import FP32, AqsgdFormat, codec_format
from wire.errors import DataError
from wire.frames import HEADER_BYTES, PAYLOAD_BYTES
from wire.spec import Direction, TensorKey

TIED_CODEC = FP32.name
"""The codec of a tied embedding's gradient, for shares and sum."""


@dataclass(frozen=True, kw_only=True)
class SampleCache:
    """The bytes that `aqsgd-b` caches once it has seen every sample."""

    stages: tuple[int, ...]
    """The memory of each stage. A snapshot in transfer holds a copy of half of it."""
    snapshot: int
    """The bytes added to a snapshot, which has each boundary once."""
    first_pass_bits: float
    """Bits per element in the first pass, including the header."""


@dataclass(frozen=True, kw_only=True)
class TextPlan:
    """The text of a run. If it cannot be read, all numbers are 0 and `problem` says why."""

    tokens: int = 0
    held_out: int = 0
    samples: int = 0
    """The samples of one pass."""
    passes: float = 0.0
    """The passes over the text in all steps."""
    sample_cache: SampleCache | None = None
    estimated: bool = False
    """Whether the text is read in shards, so that the numbers are estimated from the first ones."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    stage: int
    units: tuple[str, ...]
    """The layer units, chunk after chunk."""
    parameters: int
    held_activations: int
    """The most chunk activations that the schedule holds at once."""
    storage: Storage
    """How its blocks keep activations for backward."""
    stored: dict[str, int] | None
    """The bytes that a block keeps for a microbatch, by kind of tensor; None if autograd decides."""


@dataclass(frozen=True, kw_only=True)
class DeviceNeed:
    total: int
    state: int
    """Weights, gradients, the optimizer's moments and a codec's sample cache."""
    kept: int
    """Activations between forward and backward, for all microbatches that the schedule holds."""


@dataclass(frozen=True, kw_only=True)
class StageNeed:
    """The memory that one stage needs, by the kind of device."""

    gpu: DeviceNeed
    cpu: DeviceNeed
    """Main memory also holds snapshot copies and the reference kernels' temporaries."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """All tensors of one kind that one stage sends to another in a step."""

    sender: int
    receiver: int
    what: str
    """`activation`, `gradient`, `tied_share` or `tied_sum`."""
    codec: str
    tensors: int
    elements: int
    bytes: int
    """The bytes in frames: payload, codec header and frame headers."""
    bytes_fp32: int
    """The bytes of the same elements at 4 bytes each."""
    bytes_bf16: int
    """The bytes of the same elements at 2 bytes each."""

    @property
    def bits_per_element(self) -> float:
        return 8 * self.bytes / self.elements


@dataclass(frozen=True, kw_only=True)
class LinkDirection:
    """Everything that one stage sends to another in a step."""

    sender: int
    receiver: int
    bytes: int
    bytes_fp32: int
    bytes_bf16: int


@dataclass(frozen=True, kw_only=True)
class HeadPlace:
    """Where a tied model's head is (`pipeline.head`), and what each choice sends, in both directions
    together."""

    first: bool
    """Whether it is on the first stage, with the embedding; else on the last."""
    boundary_bytes: int
    """The bytes of a step's hidden states to the first stage, and of their gradients back."""
    exchange_bytes: int
    """The bytes of the tied weight's gradient from the last stage to the first, and of the sum back."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The stages, memory, traffic and text of a run file."""

    config: RunConfig
    microbatches: int
    tokens_per_step: int
    parameters: int
    """The parameters of all stages, including a tied head's copy."""
    head: HeadPlace | None
    """The place of the head; None unless several stages train a tied model."""
    stages: tuple[StagePlan, ...]
    memory: tuple[StageNeed, ...]
    flows: tuple[Flow, ...]
    text: TextPlan | None = None
    """The plan of the text; None if it was not requested."""

    @property
    def sync_bytes(self) -> dict[int, int]:
        """With gradient groups, the bytes that the busiest node sends to others in an exact step, by number
        of rows."""
        return self._sync_bytes(of_round=False)

    @property
    def round_bytes(self) -> dict[int, int]:
        """With gradient groups, the bytes that the busiest node sends to others in a round of local steps, by
        rows."""
        return self._sync_bytes(of_round=True)

    def _sync_bytes(self, *, of_round: bool) -> dict[int, int]:
        config = self.config
        columns = stage_units(config, config.pipeline.stages)
        busiest_bytes = {}
        for rows in range(2, config.pipeline.most_rows + 1):
            bounds = [-(-config.pipeline.groups * row // rows) for row in range(rows + 1)]
            runs = [range(first, end) for first, end in pairwise(bounds)]
            shares = [RowShare(config, row, runs) for row in range(rows)]
            busiest_bytes[rows] = max(
                sync_bytes(config, units, share, of_round=of_round) for units in columns for share in shares
            )
        return busiest_bytes

    @property
    def directions(self) -> tuple[LinkDirection, ...]:
        """The flows summed by sender and receiver. The two directions of a link carry data at the same
        time."""
        pairs = dict.fromkeys((flow.sender, flow.receiver) for flow in self.flows)
        return tuple(self._direction(*pair) for pair in pairs)

    @property
    def busiest(self) -> LinkDirection | None:
        """The direction that carries the most bytes; None for a run without links."""
        return max(self.directions, key=lambda direction: direction.bytes, default=None)

    def _direction(self, sender: int, receiver: int) -> LinkDirection:
        flows = [flow for flow in self.flows if (flow.sender, flow.receiver) == (sender, receiver)]
        return LinkDirection(
            sender=sender,
            receiver=receiver,
            bytes=sum(flow.bytes for flow in flows),
            bytes_fp32=sum(flow.bytes_fp32 for flow in flows),
            bytes_bf16=sum(flow.bytes_bf16 for flow in flows),
        )


def explain(config: RunConfig, text: TextPlan | None = None) -> Explanation:
    """Explain a valid config.

    Raises:
        ConfigError: parts of it do not fit together.
    """
    if text is not None and text.samples:
        check_cache(config, text.samples)
    pipeline, model, training = config.pipeline, config.model, config.training
    orders, passing = stage_orders(config, pipeline.stages), pass_model(config)
    stages = []
    storages = stage_storages(config, pipeline.stages)
    for stage, units in enumerate(stage_units(config, pipeline.stages)):
        storage = storages[stage]
        stages.append(
            StagePlan(
                stage=stage,
                units=units,
                parameters=sum(unit_parameters(model, unit) for unit in units),
                held_activations=held_activations(orders[stage]),
                storage=storage,
                stored=None if storage.is_off else asdict(stored_bytes(passing, training, storage)),
            )
        )
    return Explanation(
        config=config,
        microbatches=config.microbatches,
        tokens_per_step=training.global_batch * model.sequence,
        parameters=sum(plan.parameters for plan in stages),
        head=_head_place(config),
        stages=tuple(stages),
        memory=_memory_needs(config, text.samples if text is not None else 0),
        flows=_flows(config),
        text=text,
    )


def text_plan(config: RunConfig, tell: Callable[[str], None]) -> TextPlan:
    """Read the run's text and its held-out text, if they are on this machine.

    Raises:
        ConfigError: it has tokens beyond the vocabulary.
    """
    training = config.training
    try:
        corpus = load_data(config, tell)
        held_out_samples(config, corpus)
    except DataError as error:
        return TextPlan(problem=str(error))
    if isinstance(corpus, ShardedCorpus):
        tokens = corpus.estimated_tokens()
        samples = max(1, tokens // config.model.sequence)
        return TextPlan(
            tokens=tokens,
            samples=samples,
            passes=config.run.steps * training.global_batch / samples,
            estimated=True,
        )
    return TextPlan(
        tokens=len(corpus.training),
        held_out=len(corpus.validation),
        samples=corpus.windows,
        passes=config.run.steps * training.global_batch / corpus.windows,
        sample_cache=_sample_cache(config, corpus.windows),
    )


def _head_place(config: RunConfig) -> HeadPlace | None:
    stages = config.pipeline.stages
    if stages < 2 or not config.sums_tied_gradients:
        return None
    boundary, exchange = head_bytes(config)
    return HeadPlace(first=head_first(config, stages), boundary_bytes=boundary, exchange_bytes=exchange)


def framed_bytes(packed_bytes: int) -> int:
    """The bytes of the frames that carry one packed tensor, including headers."""
    return packed_bytes + ceil(packed_bytes / PAYLOAD_BYTES) * HEADER_BYTES


def _flows(config: RunConfig) -> tuple[Flow, ...]:
    """What a step sends, merged by sender, receiver and kind."""
    pipeline, model = config.pipeline, config.model
    tied = (model.vocab, model.hidden)
    sent: list[tuple[Direction, int, str, tuple[int, ...], int]] = []
    for direction, name in (
        (Direction.ACTIVATION, pipeline.first_codecs[0]),
        (Direction.GRADIENT, pipeline.first_codecs[1]),
    ):
        for boundary in range(boundaries(config, pipeline.stages)):
            sent += [
                (direction, boundary, name, shape, config.microbatches) for shape in boundary_shapes(config)
            ]
    if config.sums_tied_gradients and not head_first(config, pipeline.stages):
        for direction in (Direction.TIED_SHARE, Direction.TIED_SUM):
            sent.append((direction, 0, TIED_CODEC, tied, 1))

    merged: dict[tuple[int, int, str], Flow] = {}
    for direction, boundary, name, shape, tensors in sent:
        key = TensorKey(0, 0, 0, boundary, direction)
        sender, receiver = source_stage(key, pipeline.stages), target_stage(key, pipeline.stages)
        if sender == receiver:
            continue
        what = direction.name.lower()
        before = merged.get((sender, receiver, what))
        elements = tensors * prod(shape)
        size = tensors * framed_bytes(codec_format(name).packed_bytes(shape))
        merged[sender, receiver, what] = Flow(
            sender=sender,
            receiver=receiver,
            what=what,
            codec=name,
            tensors=tensors + (before.tensors if before else 0),
            elements=elements + (before.elements if before else 0),
            bytes=size + (before.bytes if before else 0),
            bytes_fp32=4 * elements + (before.bytes_fp32 if before else 0),
            bytes_bf16=2 * elements + (before.bytes_bf16 if before else 0),
        )
    return tuple(sorted(merged.values(), key=lambda flow: (flow.sender, flow.receiver, flow.what)))


def _sample_cache(config: RunConfig, windows: int) -> SampleCache | None:
    if not config.pipeline.remembers:
        return None
    caching = codec_format(config.pipeline.forward_codec)
    assert isinstance(caching, AqsgdFormat), "the only codec with a sample cache"
    stages, model = config.pipeline.stages, config.model
    shape = (config.training.microbatch, model.sequence, model.hidden)
    return SampleCache(
        stages=stage_cache_bytes(config, stages, windows),
        snapshot=boundaries(config, stages) * boundary_cache_bytes(config, windows),
        first_pass_bits=8 * caching.first_pass_bytes(shape) / prod(shape),
    )


def _memory_needs(config: RunConfig, windows: int) -> tuple[StageNeed, ...]:
    """Each stage's need on a node with one device.

    Args:
        windows: the samples in one pass over the text, which determine the size of a codec's sample cache; 0
            if unknown.
    """

    def needs(on_cpu: bool) -> list[DeviceNeed]:
        stages = stage_memory(config, config.pipeline.stages, Devices(on_cpu=on_cpu), windows=windows)
        return [DeviceNeed(total=memory.total, state=memory.state, kept=memory.kept) for memory in stages]

    return tuple(StageNeed(gpu=gpu, cpu=cpu) for gpu, cpu in zip(needs(False), needs(True), strict=True))
