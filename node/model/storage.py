"""The forms in which a block keeps activations for backward, and their bytes; a head's pieces. Torch-free.

Four kinds of tensor, each in its own form; everything else is recomputed in backward (AGoQ,
arXiv 2605.00539, table 1). U is the unit of that table: batch x sequence x hidden x 2 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kernels.blockfloat.layout import APART, packed_bytes
from node.config.schema import PLANNED, ModelSection, StorageSection, TrainingSection
from node.model.families.known import family_of

AS_COMPUTED = "none"
RECOMPUTE = "recompute"
FROM_PRESET = "preset"
OUTLIERS_APART = "4+outliers"
PACKED = {"bf16": 16, "8": 8, "6": 6, "5": 5, OUTLIERS_APART: 4 + APART, "4": 4, "3": 3}
"""Bits an element of the forms that are packed, as `kernels.blockfloat.layout` has them."""
KINDS = {
    "norm_input": (AS_COMPUTED, "bf16", "8", "6", "5", OUTLIERS_APART, "4"),
    "ffn_input": (AS_COMPUTED, "bf16", "8", "6", "5", "4", "3", RECOMPUTE),
    "attention": (AS_COMPUTED, "bf16", "8", "6", "5", "4", RECOMPUTE),
    "attention_output": (AS_COMPUTED, "bf16", "8", "6", "5", "4", RECOMPUTE),
}
"""The forms that each kind may be kept in. Norm inputs cannot be recomputed, and have a model's outlier
channels."""
STAGE_BITS = (4, 5, 6, 8, 16)
"""A stage has one of these numbers of bits."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a block keeps each kind of tensor: `none` (as computed), `bf16`, bits, or `recompute`."""

    norm_input: str = AS_COMPUTED
    ffn_input: str = AS_COMPUTED
    attention: str = AS_COMPUTED
    attention_output: str = AS_COMPUTED
    again: bool = False
    """Keep the block's input alone and run the block again in backward, which then has the same bits."""
    offload: tuple[str, ...] = ()
    """Kinds that wait for backward in host memory, or `all` that the block keeps; the same bits too."""

    @property
    def is_off(self) -> bool:
        """Whether plain autograd decides what is kept."""
        return replace(self, again=False, offload=()) == Storage()


PRESETS = {
    "off": Storage(),
    "agoq": Storage(norm_input="4", ffn_input="4", attention="bf16", attention_output="bf16"),
    "compact": Storage(norm_input="4", ffn_input="4", attention="8", attention_output="8"),
}


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """Bytes that one block keeps of one microbatch, by kind."""

    norm_input: int
    ffn_input: int
    attention: int
    attention_output: int
    """With the log-sum-exp."""

    @property
    def total(self) -> int:
        return self.norm_input + self.ffn_input + self.attention + self.attention_output


def unit_bytes(model: ModelSection, samples: int) -> int:
    """1 U: the hidden states of a microbatch in half precision."""
    return 2 * samples * model.sequence * model.hidden


def configured(section: StorageSection) -> Storage:
    """The preset with the kinds that the run file sets."""
    own = {kind: getattr(section, kind) for kind in KINDS if getattr(section, kind) != FROM_PRESET}
    return replace(PRESETS[section.preset], **own)


def storages_by_load(
    section: StorageSection, loads: Sequence[int], widest: int = STAGE_BITS[-1]
) -> tuple[Storage, ...]:
    """How each stage's blocks could keep their activations, from the stages' loads only.

    `node.tuning.memory.stage_storages` decides, with the rest of a stage's memory in view.

    Args:
        loads: the most block activations (microbatches x blocks) that each stage holds at once.
        widest: no more bits than these, but for a kind that the run file has in more.
    """
    base = configured(section)

    def forms(form: str) -> Sequence[str]:
        """A kind's form at each stage."""
        if PACKED.get(form, 16) >= 16:
            return [form] * len(loads)
        return [_form(bits) for bits in stage_bits(loads, PACKED[form], widest)]

    norms, ffns = forms(base.norm_input), forms(base.ffn_input)
    return tuple(replace(base, norm_input=norm, ffn_input=ffn) for norm, ffn in zip(norms, ffns, strict=True))


def stage_bits(loads: Sequence[int], base: int, widest: int = STAGE_BITS[-1]) -> tuple[int, ...]:
    """Bits of each stage: base x the heaviest load / its own, rounded down to one of `STAGE_BITS`.

    So no stage comes to hold more block activations than the heaviest does at `base` bits (AGoQ, section 4.2,
    whose equation 21 counts stages from the wrong end; loads are the schedule's own). Never below `base`, and
    above it never above `widest`.
    """
    heaviest = max(loads)
    allowed = [Fraction(base * heaviest, load) if load else Fraction(STAGE_BITS[-1]) for load in loads]
    allowed = [min(most, Fraction(widest)) for most in allowed]
    return tuple(max([base, *(bits for bits in STAGE_BITS if bits <= most)]) for most in allowed)


def stored_bytes(
    model: ModelSection, training: TrainingSection, storage: Storage, samples: int | None = None
) -> StoredBytes:
    """What a block keeps of a microbatch in this storage, which must not be off; counted from shapes."""
    samples = training.microbatch if samples is None else samples
    tokens = (samples, model.sequence)
    element = 4 if training.precision == "float32" else 2
    is_bf16 = training.precision in ("bfloat16", PLANNED)

    def kept(form: str, *widths: int, computed: int = element, packs: bool = False) -> int:
        if form == RECOMPUTE:
            return 0
        if form == AS_COMPUTED or (form == "bf16" and is_bf16 and computed == 2 and not packs):
            return sum(computed * samples * model.sequence * width for width in widths)
        return sum(packed_bytes((*tokens, width), PACKED[form]) for width in widths)

    widths = family_of(model).kept_widths(model)
    inputs = widths["norm_input"]
    # What Gemma's norms multiply by is made for each microbatch.
    vectors = 4 * (sum(inputs) + 2 * model.width) if model.norm_offset else 0
    sums = 0 if storage.attention_output == RECOMPUTE else 4 * samples * model.heads * model.sequence
    return StoredBytes(
        # The residual stream, and so the norms' input, is always float32.
        norm_input=kept(storage.norm_input, *inputs, computed=4) + vectors,
        # Packed where they are made, bfloat16 too: in whole blocks. A router's logits are kept as they are.
        ffn_input=kept(storage.ffn_input, *widths["ffn_input"], packs=True)
        + 4 * samples * model.sequence * model.experts,
        attention=kept(storage.attention, *widths["attention"]),
        attention_output=kept(storage.attention_output, *widths["attention_output"]) + sums,
    )


HEAD_LOGITS = 1 << 26
"""The most logits that a head computes at a time: 256 MiB in float32."""
FUSED_LOGITS = 1 << 28
"""The same where a kernel makes gradients in the logits' place: 512 MiB in half precision. Each piece adds to
the weight's gradient, so few pieces take less time."""


def head_piece(tokens: int, vocab: int, *, fused: bool = False) -> int:
    """How many of a microbatch's tokens go through the head at a time: equal pieces but for the last."""
    pieces = -(-tokens * vocab // (FUSED_LOGITS if fused else HEAD_LOGITS))
    return -(-tokens // max(1, pieces))


def _form(bits: int) -> str:
    return next(form for form, width in PACKED.items() if width == bits)
