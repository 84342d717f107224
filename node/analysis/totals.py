"""What a whole run comes to on given machines: seconds a step, length, bytes of each machine's line, disk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from node.analysis.explain import Explanation, Flow, explain
from node.analysis.machines import Machine
from node.config.schema import RunConfig
from node.model.units import EMBED, HEAD, block_name, is_block, unit_cost, unit_parameters
from node.pipeline.codec_ladder import first_codecs
from node.pipeline.floor import Floor, LinkRate, step_floor
from node.pipeline.placement import head_first, stage_units
from node.pipeline.snapshot_place import NODES, is_url, snapshot_bytes
from node.pipeline.stage_order import Machines, Work, plan_order

BACKWARD_TIMES = 2.0
"""Operations of a backward pass over those of its forward pass."""
TRELLIS = "trellis-4.41"
PACKING_SHARE = {TRELLIS: 0.0163}
"""How much longer a GPU computes beside packing with it, measured (scripts/results/packing_overhead.json)."""
CORE_SECONDS = {TRELLIS: 90e-9, "tah": 7.2e-9}
"""Seconds an element on one core, both ways, measured (scripts/results/rivals.json)."""
REACHED = 0.93
"""Of the lower bound's pace, what runs reach: the median of the lab's cells whose nodes have one line each
(scripts/results/lab_gpt2-xl-*-nic*.json)."""
MOST_PASSES = 4
"""Over the same text; more teach little that is new."""


@dataclass(frozen=True, kw_only=True)
class MachineBytes:
    """What one stage's machine sends and receives in a step, over all its links: they share its line."""

    stage: int
    up: int
    down: int


@dataclass(frozen=True, kw_only=True)
class Totals:
    """A run on machines whose cards and lines are known."""

    floor: Floor
    """No step is shorter."""
    seconds: float
    """Of a step, as runs reach it."""
    run_seconds: float


def machine_bytes(explanation: Explanation) -> tuple[MachineBytes, ...]:
    """First stage first: links' frames, and the token batches of the first and the last stage."""
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
    """Bytes of one snapshot, and of all that are on disk at a time: kept, the best one, one being written."""
    one = snapshot_bytes(config)
    if config.snapshots.keep == NODES or is_url(config.snapshots.keep):
        return one, one * config.snapshots.last_here
    best = 1 if config.run.keep_best and config.data.valid_every else 0
    return one, (config.run.keep_snapshots + 1 + best) * one


def totals(explanation: Explanation, machines: Sequence[Machine]) -> Totals:
    """Of a run with these machines, one a stage."""
    config = explanation.config
    floor = _floor(explanation, machines, config)
    seconds = floor.seconds / REACHED
    return Totals(floor=floor, seconds=seconds, run_seconds=seconds * config.run.steps)


def codec_advice(explanation: Explanation, machines: Sequence[Machine]) -> str | None:
    """One sentence where the same bytes are to be had at no measured cost in loss, or None.

    `tah` stays the default: this says what it costs, and what the other costs in time, on these machines.
    """
    config = explanation.config
    if config.pipeline.forward_codec != "tah" or config.pipeline.stages < 2:
        return None
    pipeline = replace(config.pipeline, forward_codec=TRELLIS)
    other = explain(replace(config, pipeline=pipeline))
    before, after = totals(explanation, machines).seconds, totals(other, machines).seconds
    if after > 1.02 * before:
        return None
    return (
        f"pipeline.forward_codec = {TRELLIS} takes the same bytes as tah ({_bits(other):.2f} and "
        f"{_bits(explanation):.2f} bits an element), hides behind the rest of a step here ({after:.3g} s, "
        f"with tah {before:.3g} s) and had no measured cost in loss, where tah had 1.4 to 1.9 %"
    )


def order_advice(explanation: Explanation, machines: Sequence[Machine]) -> str | None:
    """One sentence where these machines in another order, or with other blocks, make a step 2 % shorter."""
    config = explanation.config
    pipeline, stages = config.pipeline, config.pipeline.stages
    if stages < 2 or pipeline.chunks > 1 or head_first(config, stages):
        return None
    block, head = (unit_cost(config.model, unit) for unit in (block_name(0), HEAD))
    here = totals(explanation, machines)
    own = _stage_seconds(config, machines)
    parts = [
        sum(unit_cost(config.model, unit) for unit in units if unit != EMBED) / block
        for units in stage_units(config, stages)
    ]
    down, up = ([getattr(machine, way) for machine in machines] for way in ("down", "up"))
    sizes = [_tensor_bytes(explanation, what) for what in ("activation", "gradient")]
    order = plan_order(
        Machines(
            block_seconds=tuple(
                (1 + BACKWARD_TIMES) * seconds / part for seconds, part in zip(own, parts, strict=True)
            ),
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
        ),
    )
    if order is None:
        return None
    placed = [machines[node] for node in order.nodes]
    other = explain(replace(config, pipeline=replace(pipeline, split=order.split)))
    then = totals(other, placed)
    if then.seconds > 0.98 * here.seconds:
        return None
    names = ", ".join(map(str, placed))
    return (
        f"pipeline.split = {list(order.split)} with the machines in the order {names} makes a step "
        f"{then.seconds:.3g} s instead of {here.seconds:.3g} s: let them join in that order"
    )


def _bits(explanation: Explanation) -> float:
    flow: Flow = next(flow for flow in explanation.flows if flow.what == "activation")
    return flow.bits_per_element


def _floor(explanation: Explanation, machines: Sequence[Machine], config: RunConfig) -> Floor:
    forward = _stage_seconds(config, machines)
    return step_floor(
        microbatches=config.microbatches,
        forward=forward,
        backward=[BACKWARD_TIMES * seconds for seconds in forward],
        activation_bytes=_tensor_bytes(explanation, "activation"),
        gradient_bytes=_tensor_bytes(explanation, "gradient"),
        interfaces=[LinkRate(up=machine.up, down=machine.down) for machine in machines],
        chunks=config.pipeline.chunks,
    )


def _tensor_bytes(explanation: Explanation, what: str) -> float:
    """Of one packed tensor of this kind, frames included."""
    found = [flow for flow in explanation.flows if flow.what == what]
    return found[0].bytes / found[0].tensors if found else 0.0


def _blocks_that_fit(explanation: Explanation, machine: Machine) -> int:
    """A stage of so many blocks, kept as this run's stages are, takes no more memory than the card has."""
    config = explanation.config
    needs = [need.cpu if machine.on_cpu else need.gpu for need in explanation.memory]
    counts = [sum(map(is_block, units)) for units in stage_units(config, config.pipeline.stages)]
    each = max(need.total / max(1, count) for need, count in zip(needs, counts, strict=True))
    return max(0, int(machine.card.memory_gb * 1e9 / each))


def _stage_seconds(config: RunConfig, machines: Sequence[Machine]) -> list[float]:
    """Forward of a microbatch on each stage, with its packing."""
    model, training, pipeline = config.model, config.training, config.pipeline
    tokens = training.microbatch * model.sequence
    elements = tokens * model.hidden
    forward = []
    for stage, units in enumerate(stage_units(config, pipeline.stages)):
        weights = sum(unit_parameters(model, unit) for unit in units if unit != "embed")
        blocks = sum(is_block(unit) for unit in units)
        operations = 2.0 * weights * tokens + 2.0 * blocks * elements * model.sequence
        machine = machines[stage]
        seconds = operations / machine.flops(model.hidden)
        codecs = first_codecs(pipeline)
        sides = (stage > 0) + (stage < pipeline.stages - 1)
        if machine.on_cpu:
            # Packing has a thread of its own, but a core that computes as well.
            seconds += sum(CORE_SECONDS.get(codec, 5e-9) for codec in codecs) * elements * sides / 4
        else:
            seconds *= 1.0 + max(PACKING_SHARE.get(codec, 0.004) for codec in codecs)
        forward.append(seconds)
    return forward
