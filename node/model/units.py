"""Layer units and their parameters. This module imports no torch, since the coordinator uses it.

A model is the list "embed", "block.0000", ..., "head" (final norm and output projection). Stages hold units,
snapshots store them, and the global gradient norm is summed over them in this order.

With `tied`, the head keeps a copy of the embedding's weight, so that each may be on any stage. The copies
stay equal, because they start equal and get the same gradient: the head's share plus the embedding's share,
in that order.
"""

from functools import lru_cache

from node.config.schema import ModelSection
from node.model.families.family import ParameterSpec, used_rows
from node.model.families.known import family_of, model_problems
from wire.errors import ConfigError

EMBED = "embed"
HEAD = "head"


def block_name(index: int) -> str:
    """The name of the transformer block with this index, counted from 0 at the input."""
    return f"block.{index:04d}"


def is_block(unit: str) -> bool:
    return unit.startswith("block.")


def unit_names(model: ModelSection) -> tuple[str, ...]:
    return (EMBED, *(block_name(index) for index in range(model.layers)), HEAD)


def check_model(model: ModelSection) -> None:
    """Check the sizes of a model.

    Raises:
        ConfigError: no model can have these sizes.
    """
    family = family_of(model)
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"):
        if getattr(model, name) < 1:
            raise ConfigError(f"[model] {name} is {getattr(model, name)}; it must be at least 1")
    if model.layers > 10_000:
        raise ConfigError(f"[model] layers is {model.layers}; it must be at most 10000")
    for name, allowed in family.choices.items():
        if getattr(model, name) not in allowed:
            raise ConfigError(f"[model] {name} is {getattr(model, name)!r}; expected {', '.join(allowed)}")
    if problem := next(model_problems(model), None):
        raise ConfigError(problem)


@lru_cache(maxsize=1024)
def parameter_specs(model: ModelSection, unit: str) -> tuple[ParameterSpec, ...]:
    """The parameters of a unit, in the order that hashes and norms use.

    Raises:
        ConfigError: the model has no such unit, or impossible sizes.
    """
    check_model(model)
    if unit not in unit_names(model):
        raise ConfigError(f"no unit {unit!r} in a model of {model.layers} layers; expected embed to head")
    family = family_of(model)
    if unit == EMBED:
        return family.embedding(model)
    return family.head(model) if unit == HEAD else family.block(model)


def unit_parameters(model: ModelSection, unit: str) -> int:
    """The number of parameters of a unit. A tied head counts its copy."""
    return sum(spec.elements for spec in parameter_specs(model, unit))


def unit_cost(model: ModelSection, unit: str) -> float:
    """Forward flops per token: 2 for each weight of a matrix product, plus attention over half the sequence.

    Only the experts that compute a token count. The embedding's look-up is no product; norms and activations
    are left out.
    """
    if unit == EMBED:
        return 0.0
    specs = parameter_specs(model, unit)
    products = sum(2.0 * used_rows(model, spec) * spec.shape[1] for spec in specs if len(spec.shape) == 2)
    # Scores and their product with the values: 2 x 2 x width of the queries x sequence / 2 (causal
    # attention).
    attention = 2.0 * model.q_width * model.sequence if is_block(unit) else 0.0
    return products + attention


def ends_in_blocks(model: ModelSection) -> tuple[float, float]:
    """The costs of the embedding and the head, by `unit_cost`, in units of a block's cost."""
    block = unit_cost(model, block_name(0))
    return unit_cost(model, EMBED) / block, unit_cost(model, HEAD) / block


def tied_parameter(model: ModelSection, unit: str) -> str | None:
    """The name of the unit's copy of a tied weight, or None."""
    if not model.tied:
        return None
    return {EMBED: "tokens.weight", HEAD: "output.weight"}.get(unit)


def units_text(units: tuple[str, ...]) -> str:
    """A short description, such as `embed, 3 blocks, head`."""
    blocks = sum(is_block(unit) for unit in units)
    if not blocks:
        return ", ".join(units)
    named = [f"{blocks} block{'s' if blocks != 1 else ''}"]
    return ", ".join([*units[:1], *named] if not is_block(units[0]) else named) + (
        f", {units[-1]}" if not is_block(units[-1]) else ""
    )
