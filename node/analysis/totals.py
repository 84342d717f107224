"""What a whole run comes to on given machines: seconds a step, length, bytes of each machine's line, disk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from node.analysis.explain import Explanation, Flow, explain
from node.analysis.machines import Machine
from node.config.schema import RunConfig
from node.model.units import is_block, unit_parameters
from node.pipeline.codec_plan import first_codecs
from node.pipeline.floor import Floor, LinkRate, step_floor
from node.pipeline.placement import stage_units
from node.pipeline.snapshot_place import NODES, snapshot_bytes

BACKWARD_TIMES = 2.0
"""Operations of a backward pass over those of its forward pass."""
TRELLIS = "trellis-4.41"
PACKING_SHARE = {TRELLIS: 0.0163}
"""How much longer a GPU computes beside packing with it, measured (scripts/results/packing_overhead.json)."""
CORE_SECONDS = {TRELLIS: 90e-9, "tah": 7.2e-9}
"""Seconds an element on one core, both ways, measured (scripts/results/rivals.json)."""
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
    """Of a step."""
    seconds: float
    """Of a step: the lower bound, which runs reach to within a tenth on a slow line."""
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
    if config.snapshots.keep == NODES:
        return one, one * config.snapshots.last_here
    best = 1 if config.run.keep_best and config.data.valid_every else 0
    return one, (config.run.keep_snapshots + 1 + best) * one


def totals(explanation: Explanation, machines: Sequence[Machine]) -> Totals:
    """Of a run with these machines, one a stage."""
    config = explanation.config
    floor = _floor(explanation, machines, config)
    return Totals(floor=floor, seconds=floor.seconds, run_seconds=floor.seconds * config.run.steps)


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


def _bits(explanation: Explanation) -> float:
    flow: Flow = next(flow for flow in explanation.flows if flow.what == "activation")
    return flow.bits_per_element


def _floor(explanation: Explanation, machines: Sequence[Machine], config: RunConfig) -> Floor:
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

    def tensor_bytes(what: str) -> float:
        found = [flow for flow in explanation.flows if flow.what == what]
        return found[0].bytes / found[0].tensors if found else 0.0

    return step_floor(
        microbatches=config.microbatches,
        forward=forward,
        backward=[BACKWARD_TIMES * seconds for seconds in forward],
        activation_bytes=tensor_bytes("activation"),
        gradient_bytes=tensor_bytes("gradient"),
        interfaces=[LinkRate(up=machine.up, down=machine.down) for machine in machines],
        chunks=pipeline.chunks,
    )
