"""How long a stage's passes take on a machine, from operations and the speed of its card, estimated or
measured."""

from collections.abc import Sequence
from dataclasses import replace

from node.config.schema import RunConfig
from node.model.units import EMBED, block_name, is_block, unit_parameters
from node.schedule.placement import stage_units
from node.tuning.block_times import BlockTimes
from node.view.machines import Machine
from wire.codecs.formats import codec_format

CPUS_DIFFER = 2.0
"""A CPU whose speed is not measured may be faster or slower than the table of cards says by this factor."""


def stage_seconds(
    config: RunConfig, machines: Sequence[Machine]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The seconds of a microbatch's forward and backward on each stage, including packing."""
    model, training, pipeline = config.model, config.training, config.pipeline
    elements = training.microbatch * model.sequence * model.hidden
    formats = [codec_format(name) for name in pipeline.first_codecs]
    forward, backward = [], []
    for stage, units in enumerate(stage_units(config, pipeline.stages)):
        machine = machines[stage]
        computing = _operations(config, units) / machine.flops(model.hidden)
        sides = (stage > 0) + (stage < pipeline.stages - 1)
        packing, slower = 0.0, 1.0
        if machine.on_cpu:
            # Packing has a thread of its own, but shares its core with compute.
            packing = 1e-9 * sum(sum(known.core_nanoseconds) for known in formats) * elements * sides / 4
        else:
            slower += max(known.GPU_SHARE for known in formats)
        forward.append(slower * computing + packing)
        backward.append(machine.backward_times * (slower * computing + packing))
    return tuple(forward), tuple(backward)


def measured_machine(machine: Machine, config: RunConfig, times: BlockTimes) -> Machine:
    """The machine with the speed at which a machine like it computes a block of this run."""
    return replace(
        machine,
        measured_flops=_operations(config, (block_name(0),)) / times.forward,
        backward_times=times.backward / times.forward,
    )


def other_cpus(machines: Sequence[Machine], factor: float) -> tuple[Machine, ...]:
    """The machines, with the speed of CPUs that are not measured multiplied by `factor`."""
    return tuple(
        replace(machine, card=replace(machine.card, teraflops=factor * machine.card.teraflops))
        if machine.on_cpu and not machine.measured_flops
        else machine
        for machine in machines
    )


def _operations(config: RunConfig, units: Sequence[str]) -> float:
    """The operations of a microbatch's forward."""
    model = config.model
    tokens = config.training.microbatch * model.sequence
    weights = sum(unit_parameters(model, unit) for unit in units if unit != EMBED)
    blocks = sum(map(is_block, units))
    return 2.0 * weights * tokens + 2.0 * blocks * tokens * model.hidden * model.sequence
