"""What would make a run faster, and by how much: other codecs, another split. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from node.telemetry.run_view import FlowView, LinkView, RunView
from node.telemetry.step_model import StepModel

WORTH = 1.05
"""A change that gives less is not worth a word."""
PLENTY = 1.1
"""The first codec on the ladder that gives this is the one to name: it costs the least precision."""
LADDER = ("fixed-8", "fixed-6", "tah", "trellis-4")
"""Codecs to name, the most precise first."""
WAYS = {"activation": "forward", "gradient": "backward"}


@dataclass(frozen=True)
class Remedy:
    """A change and how many times as fast steps would be with it."""

    change: str
    gain: float

    @classmethod
    def of(cls, change: str, model: StepModel, changed: StepModel) -> Self | None:
        """None if it would not be worth a word."""
        gain = model.gain(changed)
        return cls(change, gain) if gain >= WORTH else None

    @property
    def text(self) -> str:
        digits = 2 if self.gain < 1.15 else 1
        return f"{self.change} would give about {self.gain:.{digits}f} x"


def better_codec(
    link: LinkView, view: RunView, model: StepModel, codec_bits: Mapping[str, float]
) -> Remedy | None:
    """The most precise codec for a kind of the link's tensors that gives plenty, else what gives most."""
    found: list[Remedy] = []
    for flow in sorted(link.flows, key=lambda flow: -flow.mbit):
        if flow.direction not in WAYS or flow.bits_per_element <= 0:
            continue
        for name in LADDER:
            if (remedy := _with(flow, name, codec_bits.get(name, 0.0), model)) is None:
                continue
            if remedy.gain >= PLENTY:
                return remedy
            found.append(remedy)
    return max(found, key=lambda remedy: remedy.gain, default=None)


def _with(flow: FlowView, name: str, bits: float, model: StepModel) -> Remedy | None:
    if not 0 < bits < flow.bits_per_element:
        return None
    changed = model.with_codec(flow.direction, bits / flow.bits_per_element)
    return Remedy.of(f"`{flow.codec}` to `{name}` {WAYS[flow.direction]}", model, changed)


def better_split(view: RunView, model: StepModel) -> Remedy | None:
    """Blocks given to the stages that have time for them, if the run's stages hold one chunk each."""
    blocks = [stage.blocks for stage in view.stages]
    if view.chunks > 1 or min(blocks) < 1 or len(blocks) < 2:
        return None
    times = [f + b for f, b in zip(model.forward, model.backward, strict=True)]
    if min(times) <= 0:
        return None
    # Each block in turn to the stage that is then the quickest: the best there is for equal blocks.
    a_block = [time / count for time, count in zip(times, blocks, strict=True)]
    better = [1] * len(blocks)
    for _ in range(sum(blocks) - len(blocks)):
        quickest = min(range(len(blocks)), key=lambda stage: (better[stage] + 1) * a_block[stage])
        better[quickest] += 1
    if better == blocks:
        return None
    return Remedy.of(f"`pipeline.split = {better}`", model, model.with_blocks(blocks, better))
