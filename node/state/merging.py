"""Merges adapters into the weights of a whole model.

Merged weights are the weights that training computed with: the unpacked `[lora] base` plus the adapters.
Unlike the rest of an export, this module needs torch, because it packs the base again.
"""

from collections.abc import Mapping

import numpy as np
import torch

from node.config.schema import RunConfig
from node.model.chunk import initial_weight
from node.model.lora import FrozenWeight, merged
from node.model.lora_shapes import DOWN, UP, frozen_form
from node.model.units import is_block, parameter_specs
from node.state.start import first_weights


def merged_parameters(
    config: RunConfig, unit: str, adapters: Mapping[str, np.ndarray], known: Mapping[str, str] = {}
) -> dict[str, np.ndarray]:
    """A unit's whole weights, float32, by the names in `parameter_specs`.

    Args:
        known: the SHA-256 of the checkpoint's units, as in `first_weights`.

    Raises DataError if the checkpoint that the run started from cannot be read, or has changed.
    """
    model, lora = config.model, config.lora
    specs = parameter_specs(model, unit)
    if model.from_:
        whole: Mapping[str, np.ndarray] = first_weights(model, unit, known)
    else:
        whole = {spec.name: initial_weight(model, unit, spec, config.run.seed) for spec in specs}
    parameters: dict[str, np.ndarray] = {}
    for spec in specs:
        name, array = spec.name, whole[spec.name]
        path, values = name.removesuffix(".weight"), torch.from_numpy(np.ascontiguousarray(array))
        if values.ndim == 2:
            form = frozen_form(lora, spec, in_block=is_block(unit))
            values = FrozenWeight(values, values.device, form, spec.experts).dense(torch.float32)
        if f"{path}.{UP}" in adapters:
            down, up = (torch.from_numpy(adapters[f"{path}.{kind}"].copy()) for kind in (DOWN, UP))
            values = merged(values, down, up, lora, spec.experts)
        parameters[name] = values.numpy()
    return parameters
