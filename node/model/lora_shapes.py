"""What LoRA trains and what it freezes, in terms of shapes. It imports no torch; `node.model.lora`
computes."""

from node.config.schema import LoraSection, ModelSection
from node.model.families.family import Cut, Initial, ParameterSpec
from node.model.storage import OUTLIERS_APART, PACKED
from node.model.units import block_name, is_block, parameter_specs

WHOLE = "float32"
FORMS = (WHOLE, *(form for form in PACKED if form != OUTLIERS_APART))
"""The allowed values of `[lora] base`."""
DOWN, UP = "lora_A", "lora_B"
"""The names of an adapter's matrices, as in PEFT."""


def projections(model: ModelSection) -> tuple[str, ...]:
    """The names of a block's projections. Each may have an adapter."""
    specs = parameter_specs(model, block_name(0))
    return tuple(spec.name.removesuffix(".weight") for spec in specs if len(spec.shape) == 2)


def targets(model: ModelSection, lora: LoraSection) -> tuple[str, ...]:
    """The projections that have adapters, in the model's order."""
    return tuple(name for name in projections(model) if not lora.targets or name in lora.targets)


def trained_specs(model: ModelSection, lora: LoraSection, unit: str) -> tuple[ParameterSpec, ...]:
    """The parameters of a unit that training changes: its adapters, or all parameters without LoRA."""
    specs = parameter_specs(model, unit)
    if lora.rank == 0:
        return specs
    if not is_block(unit):
        return ()
    wanted, trained = targets(model, lora), []
    for spec in specs:
        name = spec.name.removesuffix(".weight")
        if len(spec.shape) == 2 and name in wanted:
            outputs, inputs = spec.shape
            # Each matrix is cut where its projection is: A by inputs, B by outputs. Each expert has its own
            # pair.
            cuts = {cut: cut if spec.cut is cut else Cut.WHOLE for cut in Cut}
            down, up = (max(spec.experts, 1) * lora.rank, inputs), (outputs, lora.rank)
            into, out = (cuts[Cut.INPUTS], 1, spec.experts), (cuts[Cut.OUTPUTS], spec.joined, spec.experts)
            trained += [
                ParameterSpec(f"{name}.{DOWN}", down, Initial.UNIFORM, *into),
                ParameterSpec(f"{name}.{UP}", up, Initial.ZEROS, *out),
            ]
    return tuple(trained)


def largest_projection(model: ModelSection) -> int:
    """The number of elements of a block's largest matrix, or of one expert's. A projection unpacks that many
    at a time."""
    specs = parameter_specs(model, block_name(0))
    return max(spec.elements // max(spec.experts, 1) for spec in specs)


def frozen_form(lora: LoraSection, spec: ParameterSpec, *, in_block: bool) -> str:
    """The form of `FORMS` in which a frozen parameter is kept."""
    if len(spec.shape) < 2 or spec.precise or lora.base == WHOLE:
        return WHOLE
    return lora.base if in_block else "bf16"
