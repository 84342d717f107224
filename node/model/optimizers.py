"""What each optimizer keeps for a parameter, and the memory that its step needs. This module imports no
torch.

The layout of snapshots, checks of received state, memory plans, state in host memory and rounds read it here.
A rule names the class with its arithmetic. An optimizer, as named by `training.optimizer`, chooses an update
rule for each parameter.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import ClassVar, NamedTuple

from kernels.fp8.layout import BLOCK, POWER_UNIT
from node.config.schema import LoraSection, ModelSection, RunConfig, TrainingSection
from node.model.families.family import ParameterSpec
from node.model.lora_shapes import DOWN, UP, trained_specs
from node.model.units import block_name, is_block

PARAMETER_PREFIX = "parameter."
"""Prefix of the names of weights in a unit's state. All other tensors belong to the optimizer."""
OUTER_PREFIX = "outer."
"""Prefix of the names of the outer optimizer's momentum in the state after a round."""
STEP = "step"
"""Name of a unit's step count in its state."""
SQUARE, SQUARE_ROWS, SQUARE_COLUMNS = "square", "square_rows", "square_columns"
"""Prefixes of the averages of AdamW's second moments that rounds exchange: all elements of a vector, or the
row means and column means of a matrix."""
MEAN = "mean"
"""Prefix of Muon's momentum, which rounds average as a whole."""
_SIZES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}
_HEADER = 1024 * 1024
ITERATED = 1 << 24
"""The number of matrix elements that a GPU orthogonalizes at a time. A larger matrix is processed alone."""
_JOINED = "qkv_projection"
"""Prefix of projections in which the matrices of queries, keys and values are stacked."""


class Part(NamedTuple):
    """One of the flat tensors in which a moment is stored."""

    suffix: str
    """Suffix of the moment's name in a state."""
    dtype: str
    saved: str
    """The dtype in a snapshot."""
    block: int = 1
    """How many elements share one number."""
    first: int = 0
    """The value of all numbers before the first step."""

    @property
    def is_plain(self) -> bool:
        """Whether there is a number for each element, so that the tensor has the parameter's shape."""
        return self.block == 1 and self.dtype != "uint8"

    @property
    def bytes_each(self) -> float:
        """Bytes per element of the parameter."""
        return _SIZES[self.dtype] / self.block

    def count(self, elements: int) -> int:
        return -(-elements // self.block)


FORMS = {
    "float32": (Part("", "float32", "float32"),),
    "bfloat16": (Part("", "bfloat16", "float32"),),
    "fp8": (
        Part("", "uint8", "uint8"),
        Part("_scale", "bfloat16", "float32", BLOCK),
        Part("_power", "uint8", "uint8", BLOCK, POWER_UNIT),
    ),
}
"""How moments may be stored: the values of `training.moments`. The moments of vectors are always float32.
With "bfloat16" the second moments are float32 too, because one step changes them by less than bfloat16 can
represent."""


class Moment(NamedTuple):
    """A value that an optimizer keeps for each element. It is 0 before the first step."""

    name: str
    is_never_negative: bool = False


class RoundMean(NamedTuple):
    """A flat tensor that rounds average over groups for a parameter's moments."""

    elements: int
    is_coded: bool = False
    """It is packed like the changes of matrices, instead of sent in float32."""


@dataclass(frozen=True)
class UpdateRule(ABC):
    """How an optimizer updates a parameter."""

    IMPLEMENTATION: ClassVar[tuple[str, str]]
    """The module of `node.training` and the class in it that takes steps: one of
    `node.training.update_rules.Updates`, which is called with the rule and `[training]`."""
    KERNELS: ClassVar[str] = ""
    """The kernels that only its steps use, one of `kernels.common.dispatch.PARTS`; "" if there are none."""

    @abstractmethod
    def words(self, training: TrainingSection) -> str:
        """Its name and settings, for people."""

    def of_stacked(self, count: int) -> "UpdateRule":
        """The rule for a parameter in which this many equal matrices are stacked: queries, keys and values of
        one product, or experts."""
        return self

    @property
    @abstractmethod
    def moments(self) -> tuple[Moment, ...]:
        """The moments that it keeps, in the order of its step's arguments."""

    @property
    @abstractmethod
    def needs_whole(self) -> bool:
        """Whether a step needs the whole parameter. Otherwise it can update any pieces that consist of whole
        blocks, in the order of the flat parameter, also those of a shard."""

    @abstractmethod
    def step_bytes(self, training: TrainingSection, sizes: Sequence[int], *, on_cpu: bool) -> int:
        """The most memory in bytes that a step allocates for matrices or pieces of these sizes, in
        elements."""

    @abstractmethod
    def round_means(self, shape: tuple[int, ...]) -> Mapping[str, RoundMean]:
        """What rounds average over groups besides a parameter's change, by kind."""

    def stored_bytes(self, training: TrainingSection, *, is_matrix: bool) -> float:
        """Bytes of the moments of one element in memory."""
        forms = (form_of(training, moment, is_matrix=is_matrix) for moment in self.moments)
        return sum(part.bytes_each for form in forms for part in form)

    def keys(self, training: TrainingSection, name: str, *, is_matrix: bool) -> dict[str, Part]:
        """The parts of a parameter's moments by their names in its unit's state."""
        forms = {moment: form_of(training, moment, is_matrix=is_matrix) for moment in self.moments}
        return {f"{moment.name}{part.suffix}.{name}": part for moment, form in forms.items() for part in form}


@dataclass(frozen=True)
class AdamWRule(UpdateRule):
    """AdamW: means of the gradient and of its square. It works element by element."""

    IMPLEMENTATION = ("update_rules", "AdamW")
    moments = Moment("exp_avg"), Moment("exp_avg_sq", is_never_negative=True)
    needs_whole = False

    def words(self, training: TrainingSection) -> str:
        return f"AdamW, betas {training.beta1:g} and {training.beta2:g}, eps {training.eps:g}"

    def step_bytes(self, training: TrainingSection, sizes: Sequence[int], *, on_cpu: bool) -> int:
        *_, second, largest = 0, 0, *sorted(sizes)
        is_packed, unpacks = training.moments == "fp8", training.gradients == "fp8"
        wide = 4 * largest if training.moments == "bfloat16" else 0
        if not on_cpu:
            # Kernels allocate nothing. A gradient in e4m3 is unpacked for moments in float32.
            return (4 * largest if unpacks and not is_packed else 0) + wide
        # Measured matrix by matrix, all in float32: two square roots, and the unpacked gradient or the last
        # matrix's root. Random bits are int64.
        if is_packed:
            return (58 if training.weights == "bfloat16" else 34) * largest
        return 8 * largest + 4 * (largest if unpacks else second) + wide

    def round_means(self, shape: tuple[int, ...]) -> Mapping[str, RoundMean]:
        if len(shape) < 2:
            return {SQUARE: RoundMean(prod(shape))}
        return {SQUARE_ROWS: RoundMean(shape[0]), SQUARE_COLUMNS: RoundMean(prod(shape[1:]))}


@dataclass(frozen=True)
class MuonRule(UpdateRule):
    """Muon: the orthogonalized mean of the gradient (arXiv 2502.16982)."""

    IMPLEMENTATION = ("muon", "Muon")
    KERNELS = "orthogonal"
    joined: int = 1
    """The number of equal matrices stacked in the parameter, each orthogonalized by itself."""
    moments = (Moment("momentum"),)
    needs_whole = True

    def words(self, training: TrainingSection) -> str:
        return f"Muon, momentum {training.momentum:g}, {training.muon_iterations} iterations"

    def of_stacked(self, count: int) -> "MuonRule":
        return replace(self, joined=count)

    def step_bytes(self, training: TrainingSection, sizes: Sequence[int], *, on_cpu: bool) -> int:
        largest = max(sizes, default=0)
        at_once = largest if on_cpu else max(largest, min(sum(sizes), ITERATED))
        # On a CPU: the iterate twice, three squares of its shorter side, which are at most as large, and the
        # tensor that stacked matrices are joined from. On a GPU: the iterates twice, and two squares of
        # theirs.
        iterating = (4 * (5 + (self.joined > 1)) if on_cpu else 2 * 4) * at_once
        # The buffers for packing a moment are freed before the iteration begins.
        packing = (34 if training.moments == "fp8" and on_cpu else 0) * largest
        is_packed, is_rounded = training.moments == "fp8", training.weights == "bfloat16"
        in_float32 = (is_packed or training.gradients == "fp8") + is_rounded
        unpacked = 4 * in_float32 * (at_once if is_packed else largest) + 4 * is_rounded * largest
        return max(iterating, packing) + unpacked

    def round_means(self, shape: tuple[int, ...]) -> Mapping[str, RoundMean]:
        return {MEAN: RoundMean(prod(shape), is_coded=True)}


ADAMW = AdamWRule()
OPTIMIZERS: dict[str, UpdateRule] = {"adamw": ADAMW, "muon": MuonRule()}
"""The values of `training.optimizer` and `training.adapter_optimizer`, each with its rule for blocks'
matrices. `ADAMW` updates all other parameters."""
MOMENTS = {moment.name: moment for rule in OPTIMIZERS.values() for moment in rule.moments}
MOST_MOMENTS = max(len(rule.moments) for rule in OPTIMIZERS.values())


def update_rule(
    training: TrainingSection, unit: str, name: str, shape: tuple[int, ...], experts: int = 0
) -> UpdateRule:
    """The rule that updates a parameter of a unit.

    Args:
        experts: how many experts' matrices are stacked in the parameter; 0 for none.
    """
    if not is_block(unit) or len(shape) < 2:
        return ADAMW
    is_adapter = name.endswith((DOWN, UP))
    rule = OPTIMIZERS[training.adapter_optimizer if is_adapter else training.optimizer]
    is_joined = name.startswith(_JOINED) and not name.endswith(DOWN)
    return rule.of_stacked(experts or (3 if is_joined else 1))


def optimizer_words(training: TrainingSection, lora: LoraSection) -> str:
    name, matrices = training.optimizer, "matrices of blocks"
    if lora.rank:
        name, matrices = training.adapter_optimizer, "adapters"
    rule = OPTIMIZERS[name]
    own = "" if rule is ADAMW else f"{rule.words(training)}, for {matrices}; all else "
    return f"{own}{ADAMW.words(training)}, weight decay {training.weight_decay:g}"


def form_of(training: TrainingSection, moment: Moment, *, is_matrix: bool) -> tuple[Part, ...]:
    keeps = not is_matrix or (moment.is_never_negative and training.moments == "bfloat16")
    return FORMS["float32" if keeps else training.moments]


def update_rules(config: RunConfig, unit: str) -> tuple[UpdateRule, ...]:
    """The rules of a unit's `trained_specs`, in order."""
    # All blocks have the same shapes, and there may be thousands of them.
    like = block_name(0) if is_block(unit) else unit
    return _update_rules(config.model, config.lora, config.training, like)


@lru_cache(maxsize=64)
def _update_rules(
    model: ModelSection, lora: LoraSection, training: TrainingSection, unit: str
) -> tuple[UpdateRule, ...]:
    specs = trained_specs(model, lora, unit)
    return tuple(update_rule(training, unit, spec.name, spec.shape, spec.experts) for spec in specs)


# ---- states

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""The dtype and shape of each tensor by name."""


def state_layout(
    training: TrainingSection, unit: str, shapes: Mapping[str, tuple[int, ...]], *, outer: bool = False
) -> Layout:
    """The layout of `StageOptimizer.unit_state` for a unit's parameters of these shapes.

    Args:
        outer: include the outer optimizer's momentum.
    """
    layout: Layout = {STEP: ("int64", ())}
    for name, shape in shapes.items():
        layout[f"{PARAMETER_PREFIX}{name}"] = "float32", shape
        if outer:
            layout[f"{OUTER_PREFIX}{name}"] = "float32", shape
        rule, is_matrix = update_rule(training, unit, name, shape), len(shape) >= 2
        for key, part in rule.keys(training, name, is_matrix=is_matrix).items():
            layout[key] = part.saved, shape if part.is_plain else (part.count(prod(shape)),)
    return layout


def unit_layout(config: RunConfig, unit: str, *, outer: bool = False) -> Layout:
    """`state_layout` of the parameters that a run trains in this unit."""
    specs = trained_specs(config.model, config.lora, unit)
    return state_layout(config.training, unit, {spec.name: spec.shape for spec in specs}, outer=outer)


def layout_problem(expected: Layout, actual: Layout) -> str:
    """The first difference between what a state must hold and what it holds, as text; empty if they agree."""
    for name in sorted(expected.keys() ^ actual.keys()):
        return f"{name[:80]} is {'missing' if name in expected else 'unknown'}"
    for name, (dtype, shape) in expected.items():
        if actual[name] != (dtype, shape):
            other, others = actual[name]
            return f"{name} is {other} {list(others)}, not {dtype} {list(shape)}"
    return ""


def state_bytes(config: RunConfig, unit: str, *, weights_alone: bool = False) -> int:
    """Bytes of a unit's weights and optimizer state as they travel, without the file's header."""
    model, lora, training = config.model, config.lora, config.training
    like = block_name(0) if is_block(unit) else unit
    return _state_bytes(model, lora, training, like, config.has_outer_momentum, weights_alone)


@lru_cache(maxsize=64)
def _state_bytes(
    model: ModelSection,
    lora: LoraSection,
    training: TrainingSection,
    unit: str,
    outer: bool,
    weights_alone: bool,
) -> int:
    shapes = {spec.name: spec.shape for spec in trained_specs(model, lora, unit)}
    layout = state_layout(training, unit, shapes, outer=outer)
    counted = (name for name in layout if not weights_alone or name.startswith(PARAMETER_PREFIX))
    return sum(_SIZES[layout[name][0]] * prod(layout[name][1]) for name in counted)


def most_state_bytes(specs: Iterable[ParameterSpec]) -> int:
    """The largest possible size in bytes of a unit's snapshot file: weights, moments and the outer
    optimizer's momentum in float32, and the header."""
    return 4 * (2 + MOST_MOMENTS) * sum(spec.elements for spec in specs) + _HEADER
