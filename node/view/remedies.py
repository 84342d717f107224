"""Changes that would make a run faster, and by how much: other codecs, another split. All functions are
pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from node.view.run_view import FlowView, LinkView, RunView
from node.view.step_model import StepModel
from wire.codecs.formats import codec_format, proposed_names

WORTH = 1.05
"""The least gain that is worth a sentence."""
ENOUGH = 1.1
"""The first codec on the ladder with this gain is named, because it costs the least precision."""
HIDDEN = 0.98
"""Packing counts as hidden if a step is at most 2 % longer with it."""
WAYS = {"activation": "forward", "gradient": "backward"}


@dataclass(frozen=True)
class Remedy:
    """A change and its gain: old step time / new step time."""

    change: str
    gain: float
    how: str = ""
    """What it costs, and how to make it."""
    apply: Callable[[StepModel], StepModel] = field(default=lambda model: model, compare=False)
    """Applies the change to the measurements of other steps."""
    spread: tuple[float, float] | None = None
    """The least and the largest gain over parts of the measured steps."""

    @classmethod
    def of(
        cls, change: str, model: StepModel, apply: Callable[[StepModel], StepModel], how: str = ""
    ) -> Self | None:
        """The remedy; None if its gain is below `WORTH`."""
        gain = model.gain(apply(model))
        return cls(change, gain, how, apply) if gain >= WORTH else None

    def confirmed(self, parts: Sequence[StepModel]) -> Self | None:
        """The remedy with its gains in parts of the measured steps; None if a gain is below `WORTH`, so that
        it may be noise."""
        gains = [self.gain, *(part.gain(self.apply(part)) for part in parts)]
        if min(gains) < WORTH:
            return None
        return replace(self, spread=(min(gains), max(gains))) if parts else self

    @property
    def text(self) -> str:
        digits = 2 if self.gain < 1.15 else 1
        least, most = (f"{gain:.{digits}f}" for gain in self.spread or (self.gain, self.gain))
        gain = f"about {least}" if least == most else f"{least} to {most}"
        return f"{self.change} would give {gain} x{self.how}"


def better_codec(
    links: Sequence[LinkView], model: StepModel, codec_bits: Mapping[str, float]
) -> Remedy | None:
    """The most precise codec with enough gain for one kind of tensor; without one, the codec with the largest
    gain.

    Both kinds change if that gains much more, as on links that are full in both directions. A run has one
    codec for each kind, so a change applies to all links.

    Args:
        links: fullest first.
    """
    flows: dict[str, FlowView] = {}
    for flow in (flow for link in links for flow in link.flows):
        if flow.kind in WAYS and flow.bits_per_element > 0:
            flows.setdefault(flow.kind, flow)
    alone = _best(
        [_with([flow], name, model, codec_bits) for flow in flows.values() for name in proposed_names()]
    )
    if len(flows) < 2:
        return alone
    both = _best([_with(list(flows.values()), name, model, codec_bits) for name in proposed_names()])
    if both is not None and (alone is None or both.gain >= ENOUGH * alone.gain):
        return both
    return alone


def same_bytes_less_loss(
    links: Sequence[LinkView], models: Sequence[StepModel], codec_bits: Mapping[str, float]
) -> str | None:
    """A sentence if a codec with no more bytes and a lower cost in loss hides its packing; else None.

    Args:
        models: models of all measured steps and of parts of them, which must agree.
    """
    flows = [flow for link in links for flow in link.flows if flow.kind == "activation"]
    present = next((flow for flow in flows if codec_format(flow.codec).SUCCESSOR), None)
    if present is None:
        return None
    known = codec_format(present.codec)
    bits = codec_bits.get(known.SUCCESSOR, 0.0)
    if not 0 < bits <= present.bits_per_element:
        return None
    codecs = {"activation": (known.name, known.SUCCESSOR)}
    gains = [model.gain(model.with_codecs(packing=model.more_packing(codecs))) for model in models]
    if min(gains) < HIDDEN:
        return None
    return (
        f"`{known.SUCCESSOR}` forward takes the bytes of `{known.name}` ({bits:.2f} and "
        f"{present.bits_per_element:.2f} bits per element), packs beside the rest of a step here and cost "
        f"{codec_format(known.SUCCESSOR).loss_forward} in loss, where `{known.name}` cost "
        f"{known.loss_forward}: `thinwire set RUN_DIR pipeline.forward_codec={known.SUCCESSOR}`"
    )


def _best(remedies: Iterable[Remedy | None]) -> Remedy | None:
    gaining = [remedy for remedy in remedies if remedy is not None]
    enough = (remedy for remedy in gaining if remedy.gain >= ENOUGH)
    return next(enough, max(gaining, key=lambda remedy: remedy.gain, default=None))


def _with(
    flows: Sequence[FlowView], name: str, model: StepModel, codec_bits: Mapping[str, float]
) -> Remedy | None:
    """Use codec `name` for the flows that become smaller."""
    bits = codec_bits.get(name, 0.0)
    smaller = [flow for flow in flows if 0 < bits < flow.bits_per_element]
    if not smaller:
        return None
    codecs = {flow.kind: (flow.codec, name) for flow in smaller}
    factors = {flow.kind: bits / flow.bits_per_element for flow in smaller}

    def apply(model: StepModel) -> StepModel:
        return model.with_codecs(**factors, packing=model.more_packing(codecs))

    ways: dict[str, list[str]] = {}
    for flow in smaller:
        ways.setdefault(flow.codec, []).append(WAYS[flow.kind])
    change = " and ".join(f"`{codec}` to `{name}` {' and '.join(way)}" for codec, way in ways.items())
    directions = [flow.kind for flow in smaller]
    loss = ""
    if "activation" in directions and (cost := codec_format(name).loss_forward):
        loss = f" (measured cost in loss, `{name}` forward: {cost})"
    keys = " ".join(f"pipeline.{WAYS[direction]}_codec={name}" for direction in directions)
    return Remedy.of(change, model, apply, f"{loss}: `thinwire set RUN_DIR {keys}`")


def better_split(view: RunView, model: StepModel, ends_in_blocks: Sequence[float]) -> Remedy | None:
    """Move blocks to faster stages. Only for runs with one chunk per stage.

    Args:
        ends_in_blocks: the cost of the embedding and the head in blocks. They stay where they are.
    """
    blocks = [stage.blocks for stage in view.stages]
    if view.chunks > 1 or min(blocks) < 1 or len(blocks) < 2 or len(ends_in_blocks) != 2:
        return None
    fixed = [0.0] * len(blocks)
    fixed[0] += ends_in_blocks[0]
    fixed[-1 if model.head_share is None else 0] += ends_in_blocks[1]
    times = [f + b for f, b in zip(model.forward, model.backward, strict=True)]
    if min(times) <= 0:
        return None
    # Give each block to the stage that is fastest with it, which is optimal for equal blocks.
    a_block = [time / (count + end) for time, count, end in zip(times, blocks, fixed, strict=True)]
    better = [1] * len(blocks)
    for _ in range(sum(blocks) - len(blocks)):
        fastest = min(
            range(len(blocks)), key=lambda stage: (better[stage] + 1 + fixed[stage]) * a_block[stage]
        )
        better[fastest] += 1
    if better == blocks:
        return None
    before = [count + end for count, end in zip(blocks, fixed, strict=True)]
    after = [count + end for count, end in zip(better, fixed, strict=True)]
    key = f"pipeline.split={','.join(map(str, better))}"
    how = f": `thinwire set RUN_DIR {key}`"
    return Remedy.of(
        f"`pipeline.split = {better}`", model, lambda model: model.with_blocks(before, after), how
    )
