"""What a model family declares. This module imports no torch; the family's block has a torch module of its
own.

A family declares its parameters, their initial values, how tensor-parallel ranks share them and their names
in a checkpoint. It also declares which projections have the same input, what a block keeps for backward, and
which keys of `[model]` it accepts. Memory plans, checkpoints, adapters, measurements and sharding read these
declarations. No other code depends on a model's family.
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
    NORMAL = "normal"
    """A normal distribution with mean 0 and standard deviation `init_std`."""
    RESIDUAL = "residual"
    """As NORMAL, times 1 / sqrt(2 layers): for what a block adds to the residual stream (GPT-2, section
    2.3)."""
    UNIFORM = "uniform"
    """Uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs) (He et al. 2015, with a = sqrt(5), as in
    PEFT)."""
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
    """The number of matrices stacked in this one; each of them is cut by outputs."""
    experts: int = 0
    """In a mixture, the number of experts whose matrices are stacked, or whose biases are concatenated; else
    0."""
    precise: bool = False
    """A frozen parameter stays in float32, even if `[lora] base` says otherwise."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def matrices(self) -> int:
        """The number of matrices of equal shape that are stacked in this one."""
        return self.experts or self.joined

    @property
    def layer(self) -> str:
        """The name without `.weight` or `.bias`."""
        return self.name.rpartition(".")[0]

    @property
    def pieces(self) -> int | None:
        """The number of equal pieces, each of which all ranks share; None if the parameter is replicated."""
        if self.cut is Cut.WHOLE:
            return None
        return self.shape[0] if self.cut is Cut.INPUTS else self.matrices

    def shard_shape(self, ranks: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
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
    """The shape in the file. `wpe` may have more rows than a run's `sequence`; only the first ones are
    read."""
    transposed: bool = False
    """Whether the last two dimensions are [inputs, outputs]."""
    first_rows: bool = False
    part: int = 0
    """The index of this part among the parameter's parts. A part is the rows of one expert."""
    parts: int = 1
    turn: int = 0
    """The index of this parameter among those whose outputs are interleaved in the tensor."""
    turns: int = 1
    """The number of interleaved parameters."""

    def read(self, array: np.ndarray) -> np.ndarray:
        """The parameter's part from the file's tensor. Its shape may differ from the parameter's."""
        return self._own(array)

    def write(self, parameter: np.ndarray, array: np.ndarray) -> None:
        """Copy this part of a whole parameter into the file's tensor."""
        own = self._own(array)
        rows = len(parameter) // self.parts
        own[...] = parameter[self.part * rows : (self.part + 1) * rows].reshape(own.shape)

    def _own(self, array: np.ndarray) -> np.ndarray:
        """A view of the part that belongs to the parameter, with the inputs last."""
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
        """The number of elements of their matrices, together."""
        return self.outputs * self.inputs


class Family(ABC):
    """A model family. It has no state: `ModelSection` holds what differs between its models."""

    name: ClassVar[str]
    """The value of `[model] family`."""
    options: ClassVar[tuple[str, ...]] = ()
    """The optional keys of `[model]` that this family accepts."""
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The allowed values of keys that are one of a few names."""
    attention_inputs: ClassVar[tuple[str, ...]]
    attention_output: ClassVar[str] = "attention_output"
    """The projection out of attention."""
    ffn_inputs: ClassVar[tuple[str, ...]]
    """The projections into the feed-forward: one, or a gate and what it gates."""
    ffn_output: ClassVar[str] = "down"
    """The projection out of the feed-forward."""
    norm_has_bias: ClassVar[bool]
    """Whether norms are LayerNorm with weight and bias; else RMSNorm with a weight."""
    rotates: ClassVar[bool]
    """Whether positions are rotary, from tables of sines and cosines; else learned, in the embedding."""
    model_types: ClassVar[Mapping[str, str]]
    """The values of `model_type` in a `config.json`, each with transformers' class."""
    tied_types: ClassVar[tuple[str, ...]] = ()
    """The values of `model_type` whose head is tied unless the file says otherwise."""
    tokenizers: ClassVar[Mapping[str, str]] = {}
    """The class of the tokenizer that transformers takes where no file names one, by `model_type`."""
    positions_key: ClassVar[str] = "max_position_embeddings"
    """The key of a `config.json` for the maximum number of positions."""
    transposes: ClassVar[bool] = False
    """Whether a checkpoint stores the matrices of blocks as [inputs, outputs]."""

    # ---- parameters

    def embedding(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        """The parameters of the embedding, in the order that hashes and norms use."""
        tokens = _matrix("tokens", model.vocab, model.hidden)
        return (tokens,) if self.rotates else (tokens, _matrix("positions", model.sequence, model.hidden))

    @abstractmethod
    def block(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        """The parameters of a block."""

    def head(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        return (*self.norm("norm", model), _matrix("output", model.vocab, model.hidden))

    def norm(self, name: str, model: ModelSection, width: int = 0) -> tuple[ParameterSpec, ...]:
        """The parameters of a norm over `width` elements, by default the hidden ones."""
        shape = (width or model.hidden,)
        first = Initial.ZEROS if model.norm_offset else Initial.ONES
        bias = (ParameterSpec(f"{name}.bias", shape, Initial.ZEROS),) if self.norm_has_bias else ()
        return (ParameterSpec(f"{name}.weight", shape, first), *bias)

    def into(
        self, name: str, outputs: int, model: ModelSection, *, bias: bool, joined: int = 1, experts: int = 0
    ) -> tuple[ParameterSpec, ...]:
        """The parameters of a projection of hidden states, which ranks cut by outputs. With `experts`, each
        has one."""
        rows, ways = max(experts, 1) * outputs, (Cut.OUTPUTS, joined, experts)
        matrix = ParameterSpec(f"{name}.weight", (rows, model.hidden), Initial.NORMAL, *ways)
        return (matrix, ParameterSpec(f"{name}.bias", (rows,), Initial.ZEROS, *ways)) if bias else (matrix,)

    def out_of(
        self, name: str, inputs: int, model: ModelSection, *, bias: bool, experts: int = 0
    ) -> tuple[ParameterSpec, ...]:
        """The parameters of a projection to what is added to hidden states, which ranks cut by inputs. With
        `experts`, each has one."""
        rows = max(experts, 1) * model.hidden
        matrix = ParameterSpec(
            f"{name}.weight", (rows, inputs), Initial.RESIDUAL, Cut.INPUTS, experts=experts
        )
        added = ParameterSpec(f"{name}.bias", (rows,), Initial.ZEROS, experts=experts)
        return (matrix, added) if bias else (matrix,)

    # ---- computing

    @property
    def product_layers(self) -> tuple[tuple[str, ...], ...]:
        """A block's projections that every token passes through, in the order of use. Those with the same
        input are in one tuple."""
        return self.attention_inputs, (self.attention_output,), self.ffn_inputs, (self.ffn_output,)

    def products(self, model: ModelSection) -> tuple[Product, ...]:
        """The projections into attention, out of it, into the feed-forward and out of it. Sizes count only
        the rows that one token is multiplied by."""
        specs = {spec.layer: spec for spec in self.block(model) if len(spec.shape) == 2}
        groups = self.attention_inputs, (self.attention_output,), self.ffn_inputs, (self.ffn_output,)
        return tuple(
            Product(
                layers, sum(used_rows(model, specs[layer]) for layer in layers), specs[layers[0]].shape[1]
            )
            for layers in groups
        )

    def kv_heads(self, model: ModelSection) -> int:
        """The number of key/value heads."""
        return model.heads

    def kv_width(self, model: ModelSection) -> int:
        """The number of elements of a position's keys, and of its values."""
        return model.width * self.kv_heads(model)

    def kept_widths(self, model: ModelSection) -> dict[str, tuple[int, ...]]:
        """The number of a token's elements in each tensor that a block keeps for backward, by kind
        (`node.model.storage.KINDS`)."""
        keys = self.kv_width(model)
        return {
            # Two per half if it has a norm at its end: the half also keeps what that normalizes, as computed,
            # in float32 at most.
            "norm_input": (model.hidden,) * (2 if model.norm_place == "input" else 4),
            "ffn_input": (model.ffn,) * (len(self.ffn_inputs) * (model.experts_per_token or 1)),
            "attention": (model.q_width, keys, keys),
            "attention_output": (model.q_width,),
        }

    # ---- the run file

    def problems(self, model: ModelSection) -> Iterator[str]:
        """The rules between sizes that a model breaks, one line each. All sizes are at least 1."""
        if model.hidden % model.heads and not model.head_width:
            yield f"model.hidden ({model.hidden}) must be a multiple of model.heads ({model.heads})"

    def parameters_in_peft(self, model: ModelSection) -> tuple[str, ...]:
        """The projections that PEFT must address as parameters, because no transformers module holds just
        one."""
        return ()

    def adapter_problems(
        self, model: ModelSection, targets: tuple[str, ...], dropout: float
    ) -> Iterator[str]:
        """The rules that adapters on these projections break, one line each."""
        yield from ()

    # ---- checkpoints of Hugging Face

    @abstractmethod
    def paths(self, model: ModelSection) -> Mapping[str, str]:
        """A checkpoint's name of each layer, without `.weight`. The first `{}` stands for the block's number,
        a second one for the expert's."""

    def file_tensors(
        self, model: ModelSection, spec: ParameterSpec, number: int | None
    ) -> tuple[FileTensor, ...]:
        """A checkpoint's tensors of a parameter. Experts have separate tensors.

        Args:
            number: the block's number; None outside blocks.
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
        """The `model_type` that has exactly the model's features.

        Raises:
            ConfigError: there is none.
        """

    @abstractmethod
    def read_config(self, reader: ConfigReader, kind: str) -> dict[str, Any]:
        """The keys of `[model]` that a `config.json` of this `model_type` sets, without those that every
        family has.

        Raises:
            ConfigError: the model has a feature that cannot be trained faithfully.
        """

    @abstractmethod
    def write_config(
        self, model: ModelSection, kind: str, common: Mapping[str, Any], rest: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The contents of a `config.json`.

        Args:
            common: the keys that every family has.
            rest: the keys to keep of the `config.json` that the run started from; None if there is none.
        """


def used_rows(model: ModelSection, spec: ParameterSpec) -> int:
    """The rows of a block's matrix that one token is multiplied by. Of experts, only the token's own
    count."""
    return spec.shape[0] * model.experts_per_token // spec.experts if spec.experts else spec.shape[0]


def _matrix(name: str, rows: int, width: int) -> ParameterSpec:
    return ParameterSpec(f"{name}.weight", (rows, width), Initial.NORMAL)
