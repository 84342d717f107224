"""The figures of a whole run on given machines: seconds per step, length, bytes on each machine's line,
disk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log10
from typing import Any

import numpy as np

from node.config.schema import RunConfig
from node.model.units import EMBED, HEAD, block_name, is_block, unit_cost
from node.schedule.floor import Floor, LinkRate, Network, PipelineStep, chunk_shares
from node.schedule.placement import head_first, head_share, slices_of, stage_units
from node.schedule.schedule import Kind, Orders, schedule
from node.schedule.simulation import simulate
from node.tuning.device_memory import Devices
from node.tuning.memory import expected_bytes, stage_bytes
from node.tuning.snapshot_place import NODES, is_url, snapshot_bytes
from node.tuning.stage_order import Machines, Work, plan_order
from node.tuning.window_plan import MARGIN, TOLERANCE
from node.view.explain import Explanation, Flow, explain
from node.view.machines import CPUS_DIFFER, Machine, other_cpus, stage_seconds
from wire.codecs.formats import codec_format, known_format

MOST_PASSES = 4
"""The most passes over the same text. More of them teach little that is new."""


REACHED = 0.96
"""The share of the simulated pace that runs reach: the median of the lab's cells whose nodes have one line
each (scripts/results/lab_gpt2-xl-*-nic*.json, explained_steps.json)."""
ACKNOWLEDGED = ((10.0, 0.040), (100.0, 0.019), (300.0, 0.003))
"""A line's Mbit/s, and the bytes of acknowledgements that it sends back, divided by those of the frames that
it receives. Measured in the same cells. On a slow line each packet is acknowledged separately."""
WINDOWS = (0, 1, 2, 4, 8)
MOST_SIMULATED = 32
"""The most microbatches, or slices, that are simulated. Each further one takes as long as the limiting
resource."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The result of a simulated step."""

    seconds: float
    window: int
    """The microbatches in flight on each link beyond what the schedule holds, in an undisturbed step."""
    widest: int
    """The window that a run plans: with a margin, which is used only when something is delayed."""


@lru_cache(maxsize=64)
def simulated(work: PipelineStep, window: int | None = None) -> Pace:
    """A step with this window, or with the narrowest window that is as good as wider ones."""
    if window is not None:
        return Pace(seconds=_seconds(work, window), window=window, widest=window)
    widths = [width for width in WINDOWS if width < max(1, work.microbatches * work.slices)]
    seconds, least = dict[int, float](), (1 + TOLERANCE) * work.floor().seconds
    for width in widths if len(work.forward) > 1 else widths[:1]:
        seconds[width] = _seconds(work, width)
        if seconds[width] <= least:
            break
    best = min(seconds.values())
    narrowest = next(width for width, reached in seconds.items() if reached <= (1 + TOLERANCE) * best)
    margin = MARGIN if narrowest and work.chunks == 1 else 0
    return Pace(seconds=best, window=narrowest, widest=narrowest + margin)


def acknowledgements(mbit: float) -> float:
    """The bytes sent back per byte received, on a line of this rate in Mbit/s."""
    rates, shares = zip(*ACKNOWLEDGED, strict=True)
    return float(np.interp(log10(min(mbit, 1e6)), [log10(rate) for rate in rates], shares))


def lines_of(machines: Sequence[Machine], loads: Sequence[tuple[float, float]]) -> tuple[LinkRate, ...]:
    """The rate of each machine's line that is left for a step's frames, after headers and acknowledgements.

    Args:
        loads: the bytes that each machine uploads and downloads in a step.
    """
    rates = []
    for machine, (up, down) in zip(machines, loads, strict=True):
        share = acknowledgements(min(machine.up_mbit, machine.down_mbit))
        rates.append(
            LinkRate(
                up=machine.up * (up / (up + share * down) if up else 1.0),
                down=machine.down * (down / (down + share * up) if down else 1.0),
            )
        )
    return tuple(rates)


def _orders(work: PipelineStep, window: int, microbatches: int) -> Orders:
    head_first = work.head_share is not None
    # A window never exceeds the number of all slices.
    width = min(window, microbatches * work.slices)
    stages, slices = len(work.forward), work.slices
    return schedule(stages, work.chunks, microbatches, width, head_first=head_first, slices=slices)


def _seconds(work: PipelineStep, window: int) -> float:
    """The seconds of a step of any length. In its middle, all microbatches take the same time."""
    count = work.microbatches
    most = max(2, max(MOST_SIMULATED, 2 * len(work.forward)) // work.slices)
    if count <= most:
        return _total(work, window, count) + work.after_seconds
    whole, half = (_total(work, window, microbatches) for microbatches in (most, most // 2))
    return whole + (count - most) * (whole - half) / (most - most // 2) + work.after_seconds


def _total(work: PipelineStep, window: int, microbatches: int) -> float:
    stages = len(work.forward)
    shares = [share / work.slices for share in chunk_shares(stages, work.chunks, work.head_share)]
    return simulate(
        _orders(work, window, microbatches),
        lambda chunk, _: work.forward[chunk % stages] * shares[chunk],
        lambda chunk, _: work.backward[chunk % stages] * shares[chunk],
        network=Network(stages, work.links, work.interfaces),
        sizes={
            Kind.FORWARD: work.activation_bytes / work.slices,
            Kind.BACKWARD: work.gradient_bytes / work.slices,
        },
        swap=work.chunks == 1,
    ).total


@dataclass(frozen=True, kw_only=True)
class MachineBytes:
    """What one stage's machine sends and receives in a step over all its links, which share its line."""

    stage: int
    up: int
    down: int


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The figures of a run on machines whose cards and lines are known."""

    floor: Floor
    """The lower bound of a step."""
    seconds: float
    """The seconds per step that runs reach."""
    between: tuple[float, float]
    """The seconds per step if unmeasured CPUs are as fast, and as slow, as they may be."""
    run_seconds: float
    window: int
    """The microbatches in flight on each link beyond what the schedule holds."""
    memory: tuple[int, ...]
    """The bytes that each stage takes in steps: for a CPU the expected main memory, for a GPU the
    estimate."""
    most_memory: tuple[int, ...]
    """The most bytes that each stage may take: for a CPU an upper bound, for a GPU the estimate.

    It includes copies of a snapshot in transfer and codecs that are being compiled.
    """


def machine_bytes(explanation: Explanation) -> tuple[MachineBytes, ...]:
    """The bytes of each stage's machine, first stage first: links' frames, and the first and last stage's
    token batches."""
    tokens = 4 * explanation.tokens_per_step
    stages = len(explanation.stages)
    ends = [0] * stages
    ends[0] += tokens
    ends[-1] += tokens
    return tuple(
        MachineBytes(
            stage=stage,
            up=sum(flow.bytes for flow in explanation.flows if flow.sender == stage),
            down=sum(flow.bytes for flow in explanation.flows if flow.receiver == stage) + ends[stage],
        )
        for stage in range(stages)
    )


def snapshots_need(config: RunConfig) -> tuple[int, int]:
    """The bytes of one snapshot, and of all that are on disk at the same time: kept ones, the best, and one
    being written."""
    each = snapshot_bytes(config)
    if config.snapshots.keep == NODES or is_url(config.snapshots.keep):
        return each, each * config.snapshots.last_here
    best = 1 if config.run.keep_best and config.data.valid_every else 0
    return each, (config.run.keep_snapshots + 1 + best) * each


def totals(explanation: Explanation, machines: Sequence[Machine]) -> Totals:
    """The figures of a run with these machines, one per stage."""
    config = explanation.config
    work = _work(explanation, machines)
    pace = _pace(config, work)
    slow, fast = (
        simulated(_work(explanation, other_cpus(machines, factor)), pace.window).seconds
        for factor in (1 / CPUS_DIFFER, CPUS_DIFFER)
    )
    seconds = pace.seconds / REACHED
    stages = config.pipeline.stages
    expected = expected_bytes(config, stages, pace.window)
    wide = replace(config, pipeline=replace(config.pipeline, window=pace.widest))
    needs = [stage_bytes(wide, stages, Devices(on_cpu=on_cpu)) for on_cpu in (False, True)]
    return Totals(
        floor=work.floor(),
        seconds=seconds,
        between=(min(fast / REACHED, seconds), max(slow / REACHED, seconds)),
        run_seconds=seconds * config.run.steps,
        window=pace.window,
        memory=tuple(
            (expected if machine.on_cpu else needs[0])[stage] for stage, machine in enumerate(machines)
        ),
        most_memory=tuple(needs[machine.on_cpu][stage] for stage, machine in enumerate(machines)),
    )


def _pace(config: RunConfig, work: PipelineStep) -> Pace:
    return simulated(work, None if config.pipeline.window == "auto" else config.pipeline.window)


def step_seconds(explanation: Explanation, machines: Sequence[Machine]) -> float:
    """Only the seconds of a step, as in `totals`."""
    return _pace(explanation.config, _work(explanation, machines)).seconds / REACHED


def better_codecs(explanation: Explanation, machines: Sequence[Machine]) -> Explanation | None:
    """The same run with codecs that take no more bytes and cost no more loss; None if there are none.

    Both directions change if a step then takes no longer on these machines. Otherwise only one of them
    changes.
    """
    pipeline = explanation.config.pipeline
    forward, backward = known_format(pipeline.forward_codec), known_format(pipeline.backward_codec)
    if forward is None or backward is None or pipeline.stages < 2:
        return None
    successors = {"forward_codec": forward.SUCCESSOR, "backward_codec": backward.GRADIENT_SUCCESSOR}
    both: dict[str, Any] = {key: name for key, name in successors.items() if name}
    before = step_seconds(explanation, machines)
    for keys in (both, *({key: name} for key, name in both.items() if len(both) > 1)):
        other = explain(replace(explanation.config, pipeline=replace(pipeline, **keys)), explanation.text)
        pairs = zip(explanation.flows, other.flows, strict=True)
        if not keys or any(after.bytes > flow.bytes for flow, after in pairs):
            continue
        if step_seconds(other, machines) <= 1.02 * before:
            return other
    return None


def codec_advice(explanation: Explanation, machines: Sequence[Machine]) -> str | None:
    """A sentence if other codecs take no more bytes and cost no more loss; else None.

    It says what they cost in loss, and in time on these machines.
    """
    other = better_codecs(explanation, machines)
    if other is None:
        return None
    parts = []
    for key, what in (("forward_codec", "activation"), ("backward_codec", "gradient")):
        before, after = (getattr(explained.config.pipeline, key) for explained in (explanation, other))
        if before != after:
            bits = f"{_bits(other, what):.2f} bits per element, {before} {_bits(explanation, what):.2f}"
            parts.append(f"pipeline.{key} = {after} ({bits})")
    seconds = [step_seconds(explained, machines) for explained in (explanation, other)]
    known = codec_format(explanation.config.pipeline.forward_codec)
    with_less = known.SUCCESSOR and other.config.pipeline.forward_codec == known.SUCCESSOR
    cost = f", where {known.name} cost {known.loss_forward}" if with_less else ""
    return (
        f"{' and '.join(parts)} makes a step {seconds[1]:.3g} s, which is {seconds[0]:.3g} s now, and cost "
        f"nothing that could be measured in loss{cost}"
    )


@dataclass(frozen=True, kw_only=True)
class BetterOrder:
    """A shorter step of the same machines."""

    machines: tuple[Machine, ...]
    """The machines, first stage first."""
    explanation: Explanation
    """The run with the blocks that each machine takes."""
    seconds: float
    before: float


def order_advice(explanation: Explanation, machines: Sequence[Machine]) -> str | None:
    """A sentence if these machines in another order, or with other blocks, make a step 2 % shorter; else
    None."""
    other = better_order(explanation, machines)
    if other is None:
        return None
    names = ", ".join(map(str, other.machines))
    return (
        f"pipeline.split = {list(other.explanation.config.pipeline.split)} with the machines in the order "
        f"{names} makes a step {other.seconds:.3g} s instead of {other.before:.3g} s: let them join in that "
        "order"
    )


def better_order(explanation: Explanation, machines: Sequence[Machine]) -> BetterOrder | None:
    """These machines in another order, or with other blocks, if that makes a step 2 % shorter; else None."""
    config = explanation.config
    pipeline, stages = config.pipeline, config.pipeline.stages
    if stages < 2 or pipeline.chunks > 1 or head_first(config, stages):
        return None
    block, head = (unit_cost(config.model, unit) for unit in (block_name(0), HEAD))
    present = step_seconds(explanation, machines)
    own = list(map(sum, zip(*stage_seconds(config, machines), strict=True)))
    parts = [
        sum(unit_cost(config.model, unit) for unit in units if unit != EMBED) / block
        for units in stage_units(config, stages)
    ]
    down, up = ([getattr(machine, way) for machine in machines] for way in ("down", "up"))
    sizes = [_tensor_bytes(explanation, what) for what in ("activation", "gradient")]
    order = plan_order(
        Machines(
            block_seconds=tuple(seconds / part for seconds, part in zip(own, parts, strict=True)),
            most_blocks=tuple(_blocks_that_fit(explanation, machine) for machine in machines),
            rate=np.minimum(np.array(up)[:, None], np.array(down)[None, :]),
            latency=np.zeros((stages, stages)),
        ),
        Work(
            stages=stages,
            blocks=config.model.layers,
            activation_bytes=sizes[0],
            gradient_bytes=sizes[1],
            microbatches=config.microbatches,
            head_blocks=head / block,
            slices=slices_of(config),
        ),
    )
    if order is None:
        return None
    placed = tuple(machines[node] for node in order.nodes)
    other = explain(replace(config, pipeline=replace(pipeline, split=order.split)), explanation.text)
    seconds = step_seconds(other, placed)
    if seconds > 0.98 * present:
        return None
    return BetterOrder(machines=placed, explanation=other, seconds=seconds, before=present)


def _bits(explanation: Explanation, what: str) -> float:
    flow: Flow = next(flow for flow in explanation.flows if flow.what == what)
    return flow.bits_per_element


def _work(explanation: Explanation, machines: Sequence[Machine]) -> PipelineStep:
    config = explanation.config
    forward, backward = stage_seconds(config, machines)
    loads = [(load.up, load.down) for load in machine_bytes(explanation)]
    lines = lines_of(machines, loads)
    tied = [flow for flow in explanation.flows if flow.what.startswith("tied")]
    slices = slices_of(config)
    return PipelineStep(
        microbatches=config.microbatches,
        forward=forward,
        backward=backward,
        activation_bytes=slices * _tensor_bytes(explanation, "activation"),
        gradient_bytes=slices * _tensor_bytes(explanation, "gradient"),
        interfaces=lines,
        chunks=config.pipeline.chunks,
        head_share=head_share(config, config.pipeline.stages),
        slices=slices,
        # A tied weight's gradient is sent when all others are complete, and its sum comes back.
        after_seconds=sum(tie.bytes / min(lines[tie.sender].up, lines[tie.receiver].down) for tie in tied),
    )


def _tensor_bytes(explanation: Explanation, what: str) -> float:
    """The bytes of one packed tensor of this kind, with frames."""
    flows = [flow for flow in explanation.flows if flow.what == what]
    return flows[0].bytes / flows[0].tensors if flows else 0.0


def _blocks_that_fit(explanation: Explanation, machine: Machine) -> int:
    """The most blocks whose stage fits in the card's memory, if they are kept as in this run's stages."""
    config = explanation.config
    needs = [need.cpu if machine.on_cpu else need.gpu for need in explanation.memory]
    counts = [sum(map(is_block, units)) for units in stage_units(config, config.pipeline.stages)]
    each = max(need.total / max(1, count) for need, count in zip(needs, counts, strict=True))
    return max(0, int(machine.card.memory_gb * 1e9 / each))
