"""The forms in which a block keeps activations for backward, and their bytes; also the pieces of a head. This
module imports no torch.

There are four kinds of tensors, each with its own form. Everything else is recomputed in backward (AGoQ,
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
"""Bits per element of the packed forms, as in `kernels.blockfloat.layout`."""
KINDS = {
    "norm_input": (AS_COMPUTED, "bf16", "8", "6", "5", OUTLIERS_APART, "4"),
    "ffn_input": (AS_COMPUTED, "bf16", "8", "6", "5", "4", "3", RECOMPUTE),
    "attention": (AS_COMPUTED, "bf16", "8", "6", "5", "4", RECOMPUTE),
    "attention_output": (AS_COMPUTED, "bf16", "8", "6", "5", "4", RECOMPUTE),
}
"""The forms that each kind may have. Norm inputs cannot be recomputed, and contain a model's outlier
channels."""
STAGE_BITS = (4, 5, 6, 8, 16)
"""The numbers of bits that a stage may have."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How a block keeps each kind of tensor: `none` (as computed), `bf16`, a bit width, or `recompute`."""

    norm_input: str = AS_COMPUTED
    ffn_input: str = AS_COMPUTED
    attention: str = AS_COMPUTED
    attention_output: str = AS_COMPUTED
    again: bool = False
    """Keep only the block's input and run the block again in backward. The bits are the same."""
    offload: tuple[str, ...] = ()
    """The kinds that are in host memory until backward, or `all` of them. The bits are the same."""

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
    """Bytes that a block keeps of a microbatch, by kind."""

    norm_input: int
    ffn_input: int
    attention: int
    attention_output: int
    """It includes the log-sum-exp."""

    @property
    def total(self) -> int:
        return self.norm_input + self.ffn_input + self.attention + self.attention_output


def unit_bytes(model: ModelSection, samples: int) -> int:
    """1 U in bytes: the hidden states of a microbatch in half precision."""
    return 2 * samples * model.sequence * model.hidden


def configured(section: StorageSection) -> Storage:
    """The preset, with the kinds that the run file overrides."""
    own = {kind: getattr(section, kind) for kind in KINDS if getattr(section, kind) != FROM_PRESET}
    return replace(PRESETS[section.preset], **own)


def storages_by_load(
    section: StorageSection, loads: Sequence[int], widest: int = STAGE_BITS[-1]
) -> tuple[Storage, ...]:
    """A proposal of how each stage's blocks keep their activations, from the stages' loads only.

    `node.tuning.memory.stage_storages` decides, and considers the rest of a stage's memory.

    Args:
        loads: the most block activations (microbatches x blocks) that each stage holds at once.
        widest: the most bits that are proposed, unless the run file sets more for a kind.
    """
    base = configured(section)

    def forms(form: str) -> Sequence[str]:
        """A kind's form at each stage."""
        if PACKED.get(form, 16) >= 16:
            return [form] * len(loads)
        return [
            next(form for form, width in PACKED.items() if width == bits)
            for bits in stage_bits(loads, PACKED[form], widest)
        ]

    norms, ffns = forms(base.norm_input), forms(base.ffn_input)
    return tuple(replace(base, norm_input=norm, ffn_input=ffn) for norm, ffn in zip(norms, ffns, strict=True))


def stage_bits(loads: Sequence[int], base: int, widest: int = STAGE_BITS[-1]) -> tuple[int, ...]:
    """The bits of each stage: base x the heaviest load / its own, rounded down to one of `STAGE_BITS`.

    So the activations of no stage take more memory than those of the heaviest stage at `base` bits (AGoQ,
    section 4.2; its equation 21 counts stages from the wrong end, and loads here are the schedule's own). The
    result is never below `base`, and never above the larger of `base` and `widest`.
    """
    heaviest = max(loads)
    allowed = [Fraction(base * heaviest, load) if load else Fraction(STAGE_BITS[-1]) for load in loads]
    allowed = [min(most, Fraction(widest)) for most in allowed]
    return tuple(max([base, *(bits for bits in STAGE_BITS if bits <= most)]) for most in allowed)


def stored_bytes(
    model: ModelSection, training: TrainingSection, storage: Storage, samples: int | None = None
) -> StoredBytes:
    """The bytes that a block keeps of a microbatch in this storage, counted from shapes. `storage` must not
    be off."""
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
    # The factors of Gemma's norms are computed for each microbatch.
    vectors = 4 * (sum(inputs) + 2 * model.width) if model.norm_offset else 0
    sums = 0 if storage.attention_output == RECOMPUTE else 4 * samples * model.heads * model.sequence
    return StoredBytes(
        # The residual stream is always float32, and so are the norms' inputs.
        norm_input=kept(storage.norm_input, *inputs, computed=4) + vectors,
        # bfloat16 is packed too, in whole blocks. A router's logits are kept as they are.
        ffn_input=kept(storage.ffn_input, *widths["ffn_input"], packs=True)
        + 4 * samples * model.sequence * model.experts,
        attention=kept(storage.attention, *widths["attention"]),
        attention_output=kept(storage.attention_output, *widths["attention_output"]) + sums,
    )


HEAD_LOGITS = 1 << 26
"""The most logits that a head computes at a time: 256 MiB in float32."""
FUSED_LOGITS = 1 << 28
"""The most logits that a head computes at a time if a kernel overwrites them with their gradients.

They take 512 MiB in half precision. Each piece adds to the weight's gradient, so fewer pieces take less time.
"""


def head_piece(tokens: int, vocab: int, *, fused: bool = False) -> int:
    """How many of a microbatch's tokens pass through the head at a time. All pieces except the last are
    equal."""
    pieces = -(-tokens * vocab // (FUSED_LOGITS if fused else HEAD_LOGITS))
    return -(-tokens // max(1, pieces))
