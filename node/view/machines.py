"""The machines for which a run is planned: their cards, memory and lines, and how long a stage's passes take
on them.

Peaks come from data sheets (dense bf16 with float32 sums). The peak of a CPU is chosen so that a stage is as
fast as it was on one core of a server (scripts/results/explained_steps.json); others may differ by a factor
of two (`CPUS_DIFFER`). The share of the peak that a stage reaches was measured on an H200
(scripts/results/compute.json); for other devices it is an estimate.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from node.config.schema import RunConfig
from node.model.units import EMBED, block_name, is_block, unit_parameters
from node.schedule.placement import stage_units
from node.tuning.block_times import BlockTimes
from wire.codecs.formats import codec_format
from wire.errors import UserError, nearest

PAYLOAD_SHARE = 0.956
"""The share of a line's rate that is left after the headers of Ethernet, IP and TCP."""
SHARES = ((768, 0.21), (2048, 0.42))
"""The width of a model, and the share of the peak that a stage's passes reach with it (measured)."""
CPUS_DIFFER = 2.0
"""A CPU whose speed is not measured may be faster or slower than the table of cards says by this factor."""


@dataclass(frozen=True)
class Card:
    teraflops: float
    """Dense bf16, or fp16 without bf16, from its data sheet."""
    memory_gb: float
    half: str = "bfloat16"
    """Its half precision: `bfloat16`, or `float16` on cards without bf16."""


CARDS = {
    "rtx 2080 ti": Card(54, 11, "float16"),
    "rtx 3060": Card(25, 12),
    "rtx 3080": Card(60, 10),
    "rtx 3090": Card(71, 24),
    "rtx 4070": Card(58, 12),
    "rtx 4080": Card(97, 16),
    "rtx 4090": Card(165, 24),
    "rtx 5090": Card(209, 32),
    "t4": Card(65, 16, "float16"),
    "v100": Card(112, 16, "float16"),
    "a10": Card(125, 24),
    "l4": Card(121, 24),
    "l40s": Card(362, 48),
    "a100": Card(312, 80),
    "h100": Card(989, 80),
    "h200": Card(989, 141),
    "cpu": Card(0.3, 8),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node of a planned run."""

    name: str
    card: Card
    up_mbit: float = inf
    """What its line sends, in Mbit/s. All its links share it."""
    down_mbit: float = inf
    """What its line receives, in Mbit/s."""
    measured_flops: float = 0.0
    """The operations per second of a forward pass; 0 if they were not measured."""
    backward_times: float = 2.0
    """The time of a backward pass divided by that of its forward pass."""

    @property
    def on_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def up(self) -> float:
        """Payload bytes per second that it can send."""
        return self.up_mbit * PAYLOAD_SHARE / 8e-6

    @property
    def down(self) -> float:
        """Payload bytes per second that it can receive."""
        return self.down_mbit * PAYLOAD_SHARE / 8e-6

    def flops(self, hidden: int) -> float:
        """The operations per second of a forward pass in a model of this width."""
        if self.measured_flops:
            return self.measured_flops
        (narrow, low), (wide, high) = SHARES
        share = low + (high - low) * min(1.0, max(0.0, (hidden - narrow) / (wide - narrow)))
        return self.card.teraflops * 1e12 * share

    def __str__(self) -> str:
        line = "" if self.up_mbit == inf else f" at {self.up_mbit:g} Mbit/s up"
        return f"{self.name}{line}"


def parse_machine(text: str) -> Machine:
    """Parse `rtx 4090`, `rtx 4090,20` (Mbit/s up) or `rtx 4090,20/100` (up and down).

    Instead of a card's name, the text may begin with `40tflops,16gb`.

    Raises:
        UserError: the card is unknown or the text has another form.
    """
    parts = [part.strip().lower() for part in text.split(",")]
    name, rest = parts[0], parts[1:]
    card = CARDS.get(name)
    own = re.fullmatch(r"([0-9.]+) ?tflops", name)
    memory = re.fullmatch(r"([0-9.]+) ?gb", rest[0] if rest else "")
    if card is None and own and memory:
        card, rest = Card(_number(own[1], text), _number(memory[1], text)), rest[1:]
        name = f"{name}, {memory[0]}"
    if card is None:
        raise UserError(
            f"--machine {text!r}: no such card{nearest(name, CARDS)}; known: {', '.join(CARDS)}; others as "
            "40tflops,16gb"
        )
    if not rest:
        return Machine(name=name, card=card)
    rates = [_number(rate, text) for rate in rest[0].removesuffix("mbit").split("/")]
    if len(rest) > 1 or len(rates) > 2 or min(rates) <= 0:
        raise UserError(f"--machine {text!r}: expected CARD,UP or CARD,UP/DOWN with the line in Mbit/s")
    return Machine(name=name, card=card, up_mbit=rates[0], down_mbit=rates[-1] if len(rates) > 1 else inf)


def machines_for(stages: int, given: Sequence[Machine]) -> tuple[Machine, ...]:
    """One machine per stage. The last one given is repeated for the stages that follow."""
    chosen = [*given[:stages]]
    return tuple(chosen + [given[-1]] * (stages - len(chosen)))


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise UserError(f"--machine {whole!r}: {text!r} is not a number above 0")
    return value


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
