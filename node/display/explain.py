"""What a run file comes to before anything starts: values, stages, memory, bytes of a step on each link.

Bytes are counted by the code that a run itself uses: the codecs' own sizes, the frames' headers, the split
and the schedule. They are what the links write as frames; gRPC, TLS and acknowledgements come on top.
"""

import json
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any

from node.config.schema import RunConfig
from node.display.explain_data import TextPlan, text_lines
from node.display.explain_memory import StageNeed, memory_lines, memory_needs
from node.display.render import table_lines
from node.model.storage import KINDS, Storage, stored_bytes, unit_bytes
from node.model.units import is_block, unit_parameters
from node.pipeline.memory import stage_storages
from node.pipeline.placement import check_cache, stage_units
from node.pipeline.routing import source_stage, target_stage
from node.pipeline.schedule import held_activations, schedule
from node.run_file.loader import section_types, toml_value
from node.telemetry.units import bytes_text, count_text, duration_text
from wire.codecs.forms import form
from wire.frames import HEADER_BYTES, PAYLOAD_BYTES
from wire.spec import Direction, TensorKey

RATES_MBIT = (10, 100, 1000)
"""Link rates, in Mbit/s, that transfer times are given for."""
TIED_CODEC = "fp32"
"""How the shares and the sum of a tied embedding's gradient travel."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage: what it holds and what it keeps in flight."""

    stage: int
    units: tuple[str, ...]
    """Layer units, chunk after chunk."""
    parameters: int
    held_activations: int
    """The most chunk activations that the schedule makes it hold at once."""
    storage: Storage
    """How its blocks keep activations for backward."""
    stored: dict[str, int] | None
    """Bytes that a block keeps of a microbatch, by kind of tensor; None where autograd decides."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """All tensors of one kind that one stage sends another in a step."""

    sender: int
    receiver: int
    what: str
    """`activation`, `gradient`, `tied_share` or `tied_sum`."""
    codec: str
    tensors: int
    elements: int
    bytes: int
    """In frames: payload, codec header and frame headers."""
    bytes_fp32: int
    """The same elements at 4 bytes, nothing added."""
    bytes_bf16: int
    """The same elements at 2 bytes, nothing added."""

    @property
    def bits_per_element(self) -> float:
        return 8 * self.bytes / self.elements


@dataclass(frozen=True, kw_only=True)
class LinkDirection:
    """Everything that one stage sends another in a step."""

    sender: int
    receiver: int
    bytes: int
    bytes_fp32: int
    bytes_bf16: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A run file, worked out."""

    config: RunConfig
    microbatches: int
    tokens_per_step: int
    parameters: int
    """Of all stages; a tied head's copy counts."""
    stages: tuple[StagePlan, ...]
    memory: tuple[StageNeed, ...]
    """Of each stage."""
    flows: tuple[Flow, ...]
    text: TextPlan | None = None
    """None if nobody asked for it."""

    @property
    def directions(self) -> tuple[LinkDirection, ...]:
        """The flows added up by sender and receiver: the two directions of a link carry data at once."""
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
    """Work out a valid config. Raises ConfigError where parts of it do not fit."""
    if text is not None and text.samples:
        check_cache(config, text.samples)
    pipeline, model, training = config.pipeline, config.model, config.training
    orders = schedule(pipeline.stages, pipeline.chunks, config.microbatches, pipeline.first_window)
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
                stored=None if storage.is_off else asdict(stored_bytes(model, training, storage)),
            )
        )
    return Explanation(
        config=config,
        microbatches=config.microbatches,
        tokens_per_step=training.global_batch * model.sequence,
        parameters=sum(plan.parameters for plan in stages),
        stages=tuple(stages),
        memory=memory_needs(config, text.samples if text is not None else 0),
        flows=_flows(config),
        text=text,
    )


def framed_bytes(packed_bytes: int) -> int:
    """Bytes of all frames that carry one packed tensor, headers included."""
    return packed_bytes + ceil(packed_bytes / PAYLOAD_BYTES) * HEADER_BYTES


def _flows(config: RunConfig) -> tuple[Flow, ...]:
    """What a step sends, merged by sender, receiver and kind."""
    pipeline, model = config.pipeline, config.model
    hidden = (config.training.microbatch, model.sequence, model.hidden)
    tied = (model.vocab, model.hidden)
    sent: list[tuple[Direction, int, str, tuple[int, ...], int]] = []
    for direction, name in (
        (Direction.ACTIVATION, pipeline.forward_codec),
        (Direction.GRADIENT, pipeline.backward_codec),
    ):
        for boundary in range(pipeline.stages * pipeline.chunks - 1):
            sent.append((direction, boundary, name, hidden, config.microbatches))
    if model.tied:
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
        count = tensors + (before.tensors if before else 0)
        elements = count * prod(shape)
        merged[sender, receiver, what] = Flow(
            sender=sender,
            receiver=receiver,
            what=what,
            codec=name,
            tensors=count,
            elements=elements,
            bytes=count * framed_bytes(form(name).packed_bytes(shape)),
            bytes_fp32=4 * elements,
            bytes_bf16=2 * elements,
        )
    return tuple(sorted(merged.values(), key=lambda flow: (flow.sender, flow.receiver, flow.what)))


def transfer_seconds(count: int, mbit: float) -> float:
    """Seconds that `count` bytes take at `mbit` Mbit/s."""
    return count * 8 / (mbit * 1e6)


def explanation_json(explanation: Explanation) -> str:
    """The whole explanation as one JSON object, sums and transfer seconds included."""
    busiest = explanation.busiest
    whole: dict[str, Any] = asdict(explanation)
    resolved = _resolved(explanation.config)
    whole["defaults"] = [
        f"{section}.{key}" for section, keys in resolved for key, _, default in keys if default
    ]
    for flow, row in zip(explanation.flows, whole["flows"], strict=True):
        row["bits_per_element"] = flow.bits_per_element
    whole["links"] = [
        asdict(direction)
        | {"seconds_at_mbit": {str(rate): transfer_seconds(direction.bytes, rate) for rate in RATES_MBIT}}
        for direction in explanation.directions
    ]
    whole["busiest"] = asdict(busiest) if busiest else None
    return json.dumps(whole, indent=2)


def explanation_text(explanation: Explanation) -> str:
    """The whole explanation as text for a terminal."""
    lines = ["# values; those that are the default are marked with a *"]
    for section, keys in _resolved(explanation.config):
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml_value(value)}{'  *' if default else ''}" for key, value, default in keys]
    lines += ["", *_step_lines(explanation), "", *_stage_lines(explanation), ""]
    lines += [*_storage_lines(explanation), "", *memory_lines(explanation.memory), ""]
    lines += _link_lines(explanation)
    return "\n".join(lines)


def _resolved(config: RunConfig) -> list[tuple[str, list[tuple[str, Any, bool]]]]:
    """Each section's (key, value, whether it is the default)."""
    sections = []
    for name, kind in section_types().items():
        values, defaults = vars(getattr(config, name)), vars(kind())
        sections.append((name, [(key, value, value == defaults[key]) for key, value in values.items()]))
    return sections


def _step_lines(explanation: Explanation) -> list[str]:
    config = explanation.config
    return [
        f"model    {config.model.family}, {count_text(explanation.parameters)} parameters",
        f"step     {config.training.global_batch} samples of {config.model.sequence} tokens = "
        f"{count_text(explanation.tokens_per_step)} tokens, in {explanation.microbatches} microbatches of "
        f"{config.training.microbatch}",
        *(text_lines(config, explanation.text) if explanation.text is not None else []),
    ]


def _stage_lines(explanation: Explanation) -> list[str]:
    rows = [
        [
            str(plan.stage),
            _units_text(plan.units),
            count_text(plan.parameters),
            str(plan.held_activations),
        ]
        for plan in explanation.stages
    ]
    return table_lines(["stage", "holds", "parameters", "activations held at most"], rows)


def _storage_lines(explanation: Explanation) -> list[str]:
    """What a block keeps of a microbatch: form, megabytes, and units of hidden states in half precision."""
    config = explanation.config
    unit = unit_bytes(config.model, config.training.microbatch)
    if all(plan.stored is None for plan in explanation.stages):
        return ["activations: kept by autograd (storage.preset agoq or compact keeps less)"]
    rows = []
    for plan in explanation.stages:
        if plan.stored is None:
            continue
        kinds = [f"{getattr(plan.storage, kind)}: {plan.stored[kind] / unit:.3f} U" for kind in KINDS]
        total = sum(plan.stored.values())
        rows.append([str(plan.stage), *kinds, f"{total / unit:.3f} U", f"{total / 1e6:.3f} MB"])
    header = ["stage", *(kind.replace("_", " ") for kind in KINDS), "a block", "bytes"]
    return [
        f"a block keeps for backward (1 U = hidden states of a microbatch at 2 bytes = {unit / 1e6:.3f} MB):",
        *table_lines(header, rows),
    ]


def _units_text(units: tuple[str, ...]) -> str:
    """`embed, 3 blocks, head`."""
    blocks = sum(is_block(unit) for unit in units)
    named = [f"{blocks} block{'s' if blocks != 1 else ''}"]
    return ", ".join([*units[:1], *named] if not is_block(units[0]) else named) + (
        f", {units[-1]}" if not is_block(units[-1]) else ""
    )


def _link_lines(explanation: Explanation) -> list[str]:
    busiest = explanation.busiest
    if busiest is None:
        return ["a single stage: nothing crosses the network but batches and snapshots"]
    header = ["link", "what", "codec", "tensors", "bytes a step", "bits/element", "FP32", "BF16"]
    rows = [
        [
            f"{flow.sender} -> {flow.receiver}",
            flow.what.replace("_", " "),
            flow.codec,
            str(flow.tensors),
            bytes_text(flow.bytes),
            f"{flow.bits_per_element:.3f}",
            bytes_text(flow.bytes_fp32),
            bytes_text(flow.bytes_bf16),
        ]
        for flow in explanation.flows
    ]
    lines = ["each step puts on the links:", *table_lines(header, rows, left=3), ""]
    lines.append("time on each link direction, a step (the two directions of a link run at once):")
    times = [
        [
            f"{direction.sender} -> {direction.receiver}",
            bytes_text(direction.bytes),
            *(duration_text(transfer_seconds(direction.bytes, rate)) for rate in RATES_MBIT),
            *(duration_text(transfer_seconds(direction.bytes_fp32, rate)) for rate in RATES_MBIT),
        ]
        for direction in explanation.directions
    ]
    rates = [f"{rate} Mbit/s" for rate in RATES_MBIT]
    lines += table_lines(["link", "bytes", *rates, *(f"FP32 {rate}" for rate in RATES_MBIT)], times, left=1)
    lines.append(
        f"busiest: {busiest.sender} -> {busiest.receiver}, {bytes_text(busiest.bytes)} a step; no step is "
        "faster than that takes"
    )
    return lines
