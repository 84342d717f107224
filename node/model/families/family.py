"""What a model family declares. Torch-free; its block in torch is in a module of its own beside it.

A family says which parameters it has, how they start, how tensor-parallel ranks share them and what a
checkpoint calls them; which projections have the same input; what a block keeps for backward; and which keys
of `[model]` it takes. Memory plans, checkpoints, adapters, measuring and sharding read that; nothing else
asks which family a model is of.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any, ClassVar

import numpy as np

from node.config.schema import ModelSection
from node.model.families.config_json import ConfigReader


class Initial(StrEnum):
    """How a parameter starts."""

    NORMAL = "normal"
    """Mean 0, standard deviation `init_std`."""
    RESIDUAL = "residual"
    """As NORMAL, times 1 / sqrt(2 layers): what a block adds to the residual stream (GPT-2, section 2.3)."""
    UNIFORM = "uniform"
    """Between -1 / sqrt(inputs) and that (He et al. 2015, with a = sqrt(5), as in PEFT)."""
    ONES = "ones"
    ZEROS = "zeros"


class Cut(StrEnum):
    """How tensor-parallel ranks share a parameter."""

    WHOLE = "whole"
    """Every rank holds all of it."""
    OUTPUTS = "outputs"
    INPUTS = "inputs"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of a unit; matrices are [outputs, inputs], always float32."""

    name: str
    shape: tuple[int, ...]
    initial: Initial
    cut: Cut = Cut.WHOLE
    joined: int = 1
    """Matrices in this one, each of which is cut by outputs."""
    experts: int = 0
    """Of a mixture: so many experts' matrices under one another, or their biases one after another."""
    precise: bool = False
    """Kept in float32 where it is frozen, whatever `[lora] base` is."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def matrices(self) -> int:
        """How many matrices of equal shape are under one another in this one."""
        return self.experts or self.joined

    @property
    def layer(self) -> str:
        """The name without `.weight` or `.bias`."""
        return self.name.rpartition(".")[0]

    @property
    def pieces(self) -> int | None:
        """How many equal pieces are each shared between all ranks; None if it is replicated."""
        if self.cut is Cut.WHOLE:
            return None
        return self.shape[0] if self.cut is Cut.INPUTS else self.matrices

    def shard_shape(self, ranks: int) -> tuple[int, ...]:
        """The shape of what one rank holds."""
        if self.cut is Cut.WHOLE:
            return self.shape
        if self.cut is Cut.INPUTS:
            return (self.shape[0], self.shape[1] // ranks)
        return (self.shape[0] // ranks, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A parameter, or one of its equal parts, as a checkpoint's tensor or as a part of one."""

    name: str
    shape: tuple[int, ...]
    """In the file. `wpe` may have more rows than a run's `sequence`: the first ones are read."""
    transposed: bool = False
    """The last two dimensions are [inputs, outputs]."""
    first_rows: bool = False
    part: int = 0
    """Which of the parameter's parts this is, the rows of one expert,"""
    parts: int = 1
    """and how many there are."""
    turn: int = 0
    """Which of the parameters this is whose outputs take turns in the tensor,"""
    turns: int = 1
    """and how many there are."""

    def read(self, array: np.ndarray) -> np.ndarray:
        """What the file's tensor has of the parameter, the parameter's part but for its shape."""
        return self._own(array)

    def write(self, parameter: np.ndarray, array: np.ndarray) -> None:
        """Put the part of a whole parameter into the file's tensor."""
        own = self._own(array)
        rows = len(parameter) // self.parts
        own[...] = parameter[self.part * rows : (self.part + 1) * rows].reshape(own.shape)

    def _own(self, array: np.ndarray) -> np.ndarray:
        """A view of what belongs to the parameter, the inputs last."""
        own = array[..., self.turn :: self.turns]
        return own.swapaxes(-1, -2) if self.transposed else own


@dataclass(frozen=True, slots=True)
class Product:
    """Projections of a block that have the same input and are multiplied as one."""

    layers: tuple[str, ...]
    outputs: int
    inputs: int

    @property
    def elements(self) -> int:
        """Of their matrices, together."""
        return self.outputs * self.inputs


class Family(ABC):
    """One family. It has no state: what varies between its models is in `ModelSection`."""

    name: ClassVar[str]
    """The value of `[model] family`."""
    options: ClassVar[tuple[str, ...]] = ()
    """Keys of `[model]` that it takes and not every family does."""
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The values of those that are one of a few names."""
    attention_inputs: ClassVar[tuple[str, ...]]
    """Projections into attention,"""
    attention_output: ClassVar[str] = "attention_output"
    """out of it,"""
    ffn_inputs: ClassVar[tuple[str, ...]]
    """into the feed-forward: one, or a gate and what it gates,"""
    ffn_output: ClassVar[str] = "down"
    """and out of it."""
    norm_has_bias: ClassVar[bool]
    """LayerNorm with weight and bias; else RMSNorm with a weight."""
    rotates: ClassVar[bool]
    """Positions are rotary, from tables of sines and cosines; else learned, in the embedding."""
    model_types: ClassVar[Mapping[str, str]]
    """The values of `model_type` in a `config.json`, with transformers' class for each."""
    tied_types: ClassVar[tuple[str, ...]] = ()
    """Those whose head is tied unless the file says otherwise."""
    positions_key: ClassVar[str] = "max_position_embeddings"
    """The key of a `config.json` for the most positions."""
    transposes: ClassVar[bool] = False
    """A checkpoint has matrices of blocks as [inputs, outputs]."""

    # ---- parameters

    def embedding(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        """Parameters of the embedding, in the order that hashes and norms use."""
        tokens = _matrix("tokens", model.vocab, model.hidden)
        return (tokens,) if self.rotates else (tokens, _matrix("positions", model.sequence, model.hidden))

    @abstractmethod
    def block(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        """Those of a block."""

    def head(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        """Those of the head."""
        return (*self.norm("norm", model), _matrix("output", model.vocab, model.hidden))

    def norm(self, name: str, model: ModelSection, width: int = 0) -> tuple[ParameterSpec, ...]:
        """Those of a norm over `width` elements, by default the hidden ones."""
        shape = (width or model.hidden,)
        first = Initial.ZEROS if model.norm_offset else Initial.ONES
        bias = (ParameterSpec(f"{name}.bias", shape, Initial.ZEROS),) if self.norm_has_bias else ()
        return (ParameterSpec(f"{name}.weight", shape, first), *bias)

    def into(
        self, name: str, outputs: int, model: ModelSection, *, bias: bool, joined: int = 1, experts: int = 0
    ) -> tuple[ParameterSpec, ...]:
        """Those of a projection of hidden states, or of one in each of `experts`, which ranks cut by
        outputs."""
        rows, ways = max(experts, 1) * outputs, (Cut.OUTPUTS, joined, experts)
        matrix = ParameterSpec(f"{name}.weight", (rows, model.hidden), Initial.NORMAL, *ways)
        return (matrix, ParameterSpec(f"{name}.bias", (rows,), Initial.ZEROS, *ways)) if bias else (matrix,)

    def out_of(
        self, name: str, inputs: int, model: ModelSection, *, bias: bool, experts: int = 0
    ) -> tuple[ParameterSpec, ...]:
        """Those of a projection to what is added to hidden states, or of one in each of `experts`, which
        ranks cut by inputs."""
        rows = max(experts, 1) * model.hidden
        matrix = ParameterSpec(
            f"{name}.weight", (rows, inputs), Initial.RESIDUAL, Cut.INPUTS, experts=experts
        )
        added = ParameterSpec(f"{name}.bias", (rows,), Initial.ZEROS, experts=experts)
        return (matrix, added) if bias else (matrix,)

    # ---- computing

    @property
    def product_layers(self) -> tuple[tuple[str, ...], ...]:
        """A block's projections that every token goes through, in the order that it uses them; those with the
        same input together."""
        return self.attention_inputs, (self.attention_output,), self.ffn_inputs, (self.ffn_output,)

    def products(self, model: ModelSection) -> tuple[Product, ...]:
        """The projections into attention and out of it, into the feed-forward and out of it, with the sizes
        of what one token is multiplied by."""
        specs = {spec.layer: spec for spec in self.block(model) if len(spec.shape) == 2}
        groups = self.attention_inputs, (self.attention_output,), self.ffn_inputs, (self.ffn_output,)
        return tuple(
            Product(
                layers, sum(used_rows(model, specs[layer]) for layer in layers), specs[layers[0]].shape[1]
            )
            for layers in groups
        )

    def kv_heads(self, model: ModelSection) -> int:
        """How many heads keys and values have."""
        return model.heads

    def kv_width(self, model: ModelSection) -> int:
        """Of a position's keys, and of its values."""
        return model.width * self.kv_heads(model)

    def kept_widths(self, model: ModelSection) -> dict[str, tuple[int, ...]]:
        """Elements of a token in each tensor that a block keeps for backward, by kind
        (`node.model.storage.KINDS`)."""
        keys = self.kv_width(model)
        return {
            # Of each half; one with a norm at its end keeps what that normalises too, as computed in float32
            # at most.
            "norm_input": (model.hidden,) * (2 if model.norm_place == "input" else 4),
            "ffn_input": (model.ffn,) * (len(self.ffn_inputs) * (model.experts_per_token or 1)),
            "attention": (model.q_width, keys, keys),
            "attention_output": (model.q_width,),
        }

    # ---- the run file

    def problems(self, model: ModelSection) -> Iterator[str]:
        """Rules between sizes that a model breaks, a line each. All sizes are at least 1."""
        if model.hidden % model.heads and not model.head_width:
            yield f"model.hidden ({model.hidden}) must be a multiple of model.heads ({model.heads})"

    def parameters_in_peft(self, model: ModelSection) -> tuple[str, ...]:
        """Projections that PEFT has to find as parameters, because no module of transformers is one alone."""
        return ()

    def adapter_problems(
        self, model: ModelSection, targets: tuple[str, ...], dropout: float
    ) -> Iterator[str]:
        """What adapters on these projections break, a line each."""
        yield from ()

    # ---- checkpoints of Hugging Face

    @abstractmethod
    def paths(self, model: ModelSection) -> Mapping[str, str]:
        """A checkpoint's name of each layer, without `.weight`; `{}` is for the number of the block, and a
        second one for that of the expert."""

    def file_tensors(
        self, model: ModelSection, spec: ParameterSpec, number: int | None
    ) -> tuple[FileTensor, ...]:
        """A checkpoint's tensors of a parameter: the parts of one of the experts lie apart.

        Args:
            number: of its block; None outside of blocks.
        """
        path, kind = self.paths(model)[spec.layer], spec.name.rpartition(".")[2]
        transposed = self.transposes and number is not None and len(spec.shape) == 2
        parts = spec.experts or 1
        shape = (spec.shape[0] // parts, *spec.shape[1:])
        return tuple(
            FileTensor(
                f"{path.format(number, part)}.{kind}",
                shape[::-1] if transposed else shape,
                transposed=transposed,
                first_rows=spec.layer == "positions",
                part=part,
                parts=parts,
            )
            for part in range(parts)
        )

    @abstractmethod
    def model_type(self, model: ModelSection) -> str:
        """The `model_type` that has exactly a model's features. Raises ConfigError if none has."""

    @abstractmethod
    def read_config(self, reader: ConfigReader, kind: str) -> dict[str, Any]:
        """The keys of `[model]` that a `config.json` of this `model_type` sets, but for those that every
        family has. Raises ConfigError for what cannot be trained faithfully."""

    @abstractmethod
    def write_config(
        self, model: ModelSection, kind: str, common: Mapping[str, Any], rest: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """A whole `config.json`.

        Args:
            common: the keys that every family has.
            rest: what stays of the one that the run started from, if it started from one.
        """


def used_rows(model: ModelSection, spec: ParameterSpec) -> int:
    """Rows of a block's matrix that one token is multiplied by: of experts, those of the token's own."""
    return spec.shape[0] * model.experts_per_token // spec.experts if spec.experts else spec.shape[0]


def _matrix(name: str, rows: int, width: int) -> ParameterSpec:
    return ParameterSpec(f"{name}.weight", (rows, width), Initial.NORMAL)
