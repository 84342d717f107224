"""Layer units and their parameters. Torch-free, for the coordinator.

A model is the list "embed", "block.0000", ..., "head" (final norm and output projection). Stages hold units,
snapshots store them, and the global gradient norm is summed over them in this order.

With `tied`, the head keeps a copy of the embedding's weight, so that each may be on any stage. The copies
stay equal because both start equal and get the same gradient: head's share + embed's share, in that order.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod

from node.config.schema import ModelSection
from wire.errors import ConfigError

EMBED = "embed"
HEAD = "head"
FAMILIES = ("llama", "gpt2")
CHOICES = {
    "rope_scaling": ("none", "linear", "llama3"),
    "qk_norm": ("none", "head", "full"),
    "norm_place": ("input", "output", "both"),
    "activation": ("silu", "gelu"),
}
"""Values of the keys that vary a `llama` block."""


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


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of a unit; matrices are [outputs, inputs], always float32."""

    name: str
    shape: tuple[int, ...]
    initial: Initial

    @property
    def elements(self) -> int:
        return prod(self.shape)


def block_name(index: int) -> str:
    """Name of the transformer block that is `index`-th from the input, counted from 0."""
    return f"block.{index:04d}"


def is_block(unit: str) -> bool:
    return unit.startswith("block.")


def unit_names(model: ModelSection) -> tuple[str, ...]:
    """All layer units in model order."""
    return (EMBED, *(block_name(index) for index in range(model.layers)), HEAD)


def check_model(model: ModelSection) -> None:
    """Raise `ConfigError` for sizes that no model can have."""
    if model.family not in FAMILIES:
        raise ConfigError(f"[model] family is {model.family!r}; it must be one of {', '.join(FAMILIES)}")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"):
        if getattr(model, name) < 1:
            raise ConfigError(f"[model] {name} is {getattr(model, name)}; it must be at least 1")
    if model.layers > 10_000:
        raise ConfigError(f"[model] layers is {model.layers}; at most 10000 can be named")
    if model.hidden % model.heads and not model.head_width:
        raise ConfigError(f"[model] hidden {model.hidden} must be a multiple of heads {model.heads}")
    if model.family == "llama":
        if model.heads % model.kv_heads:
            raise ConfigError(f"[model] kv_heads {model.kv_heads} must divide heads {model.heads}")
        if model.width % 2:
            raise ConfigError(f"[model] hidden / heads is {model.width}; rotary positions need it to be even")
        if model.window < 0:
            raise ConfigError(f"[model] window is {model.window}; it must be at least 0")
        for name, allowed in CHOICES.items():
            if getattr(model, name) not in allowed:
                raise ConfigError(
                    f"[model] {name} is {getattr(model, name)!r}; it must be one of {', '.join(allowed)}"
                )


@lru_cache(maxsize=1024)
def parameter_specs(model: ModelSection, unit: str) -> tuple[ParameterSpec, ...]:
    """The parameters of a unit, in the order that hashes and norms use.

    Raises:
        ConfigError: the model has no such unit, or impossible sizes.
    """
    check_model(model)
    if unit not in unit_names(model):
        raise ConfigError(f"no unit {unit!r} in a model of {model.layers} layers; expected embed to head")
    llama = model.family == "llama"
    if unit == EMBED:
        tokens = _matrix("tokens", model.vocab, model.hidden)
        return (tokens,) if llama else (tokens, _matrix("positions", model.sequence, model.hidden))
    if unit == HEAD:
        return (*_norm("norm", model), _matrix("output", model.vocab, model.hidden))
    return _llama_block(model) if llama else _gpt2_block(model)


def unit_parameters(model: ModelSection, unit: str) -> int:
    """Number of parameters a unit holds; a tied head counts its copy."""
    return sum(spec.elements for spec in parameter_specs(model, unit))


def unit_cost(model: ModelSection, unit: str) -> float:
    """Forward flops a token: 2 a weight of each matrix product, plus attention over half the sequence.

    Looking tokens up costs no product; norms and activations are left out.
    """
    if unit == EMBED:
        return 0.0
    specs = parameter_specs(model, unit)
    products = sum(2.0 * spec.elements for spec in specs if len(spec.shape) == 2)
    # Scores and their product with the values: 2 x 2 x queries' width x (sequence / 2, being causal).
    attention = 2.0 * model.q_width * model.sequence if is_block(unit) else 0.0
    return products + attention


def ends_in_blocks(model: ModelSection) -> tuple[float, float]:
    """What the embedding and the head cost, by `unit_cost`, in blocks."""
    block = unit_cost(model, block_name(0))
    return unit_cost(model, EMBED) / block, unit_cost(model, HEAD) / block


def tied_parameter(model: ModelSection, unit: str) -> str | None:
    """Name of the unit's parameter that is one of the two copies of a tied weight, if it holds one."""
    if not model.tied:
        return None
    return {EMBED: "tokens.weight", HEAD: "output.weight"}.get(unit)


def _matrix(name: str, outputs: int, inputs: int, initial: Initial = Initial.NORMAL) -> ParameterSpec:
    return ParameterSpec(f"{name}.weight", (outputs, inputs), initial)


def _bias(name: str, width: int) -> ParameterSpec:
    return ParameterSpec(f"{name}.bias", (width,), Initial.ZEROS)


def _scale(name: str, width: int, model: ModelSection) -> ParameterSpec:
    """An RMSNorm's weight, or LayerNorm's."""
    return ParameterSpec(f"{name}.weight", (width,), Initial.ZEROS if model.norm_offset else Initial.ONES)


def _norm(name: str, model: ModelSection) -> tuple[ParameterSpec, ...]:
    weight = _scale(name, model.hidden, model)
    return (weight,) if model.family == "llama" else (weight, _bias(name, model.hidden))


def _llama_block(model: ModelSection) -> tuple[ParameterSpec, ...]:
    widths = {"query": model.q_width, "key": model.width * model.kv_heads}
    widths["value"] = widths["key"]
    inputs: list[ParameterSpec] = []
    for name, width in widths.items():
        inputs.append(_matrix(name, width, model.hidden))
        if model.qkv_bias:
            inputs.append(_bias(name, width))
    if model.qk_norm != "none":
        for name in ("query", "key"):
            normed = model.width if model.qk_norm == "head" else widths[name]
            inputs.append(_scale(f"{name}_norm", normed, model))
    both = model.norm_place == "both"
    return (
        *_norm("attention_norm", model),
        *inputs,
        _matrix("attention_output", model.hidden, model.q_width, Initial.RESIDUAL),
        *(_norm("attention_output_norm", model) if both else ()),
        *_norm("ffn_norm", model),
        _matrix("gate", model.ffn, model.hidden),
        _matrix("up", model.ffn, model.hidden),
        _matrix("down", model.hidden, model.ffn, Initial.RESIDUAL),
        *(_norm("ffn_output_norm", model) if both else ()),
    )


def _gpt2_block(model: ModelSection) -> tuple[ParameterSpec, ...]:
    return (
        *_norm("attention_norm", model),
        _matrix("qkv_projection", 3 * model.hidden, model.hidden),
        _bias("qkv_projection", 3 * model.hidden),
        _matrix("attention_output", model.hidden, model.hidden, Initial.RESIDUAL),
        _bias("attention_output", model.hidden),
        *_norm("ffn_norm", model),
        _matrix("up", model.ffn, model.hidden),
        _bias("up", model.ffn),
        _matrix("down", model.hidden, model.ffn, Initial.RESIDUAL),
        _bias("down", model.hidden),
    )


def units_text(units: tuple[str, ...]) -> str:
    """`embed, 3 blocks, head`."""
    blocks = sum(is_block(unit) for unit in units)
    if not blocks:
        return ", ".join(units)
    named = [f"{blocks} block{'s' if blocks != 1 else ''}"]
    return ", ".join([*units[:1], *named] if not is_block(units[0]) else named) + (
        f", {units[-1]}" if not is_block(units[-1]) else ""
    )
