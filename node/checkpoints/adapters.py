"""Adapters of a LoRA run: a folder in PEFT's format, or weights of a whole model with the adapters merged in.

    OUT/adapter_config.json  adapter_model.safetensors  README.md  tokenizer files

PEFT's `PeftModel.from_pretrained(base, OUT)` loads the folder. It says which base it belongs to: the
checkpoint that the run started from. Merged weights are those that training computed with: what `[lora] base`
unpacks to, plus the adapters.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from node.checkpoints.families import tensors
from node.checkpoints.hub import PREFIX, Repository
from node.checkpoints.start import read_units
from node.config.schema import RunConfig
from node.model.lora_shapes import DOWN, UP, WHOLE, targets
from node.model.storage import PACKED
from node.model.units import block_name, is_block, parameter_specs

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def peft_name(config: RunConfig, unit: str, name: str) -> str:
    """PEFT's key of an adapter's matrix, `name` being that of `node.model.lora_shapes.trained_specs`."""
    path, _, kind = name.rpartition(".")
    whole = tensors(config.model, unit)[f"{path}.weight"].name
    return f"base_model.model.{whole.removesuffix('.weight')}.{kind}.weight"


def adapter_config(config: RunConfig) -> dict[str, Any]:
    """`adapter_config.json`."""
    model, lora = config.model, config.lora
    named = tensors(model, block_name(0))
    # Two parts of a name, as GPT-2 has c_proj in both halves of a block.
    modules = [".".join(named[f"{name}.weight"].name.split(".")[-3:-1]) for name in targets(model, lora)]
    base, revision = model.from_, None
    if base.startswith(PREFIX):
        repository = Repository.parse(base)
        base, revision = repository.name, repository.revision
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "fan_in_fan_out": model.family == "gpt2",
        "bias": "none",
        "inference_mode": True,
    }


def merged_parameters(
    config: RunConfig, unit: str, adapters: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """A unit's whole weights, float32, by the names of `parameter_specs`.

    Raises DataError if the checkpoint that the run started from cannot be read.
    """
    # Packing needs torch, which the rest of an export does without.
    import torch

    from node.model.chunk import initial_weight
    from node.model.lora import FrozenWeight, merged

    model, lora = config.model, config.lora
    if model.from_:
        whole = asyncio.run(read_units(model, [unit]))[unit]
    else:
        specs = parameter_specs(model, unit)
        whole = {spec.name: initial_weight(model, unit, spec, config.run.seed) for spec in specs}
    found: dict[str, np.ndarray] = {}
    for name, array in whole.items():
        path, values = name.removesuffix(".weight"), torch.from_numpy(np.ascontiguousarray(array))
        if values.ndim == 2:
            form = lora.base if is_block(unit) else WHOLE if lora.base == WHOLE else "bf16"
            assert form == WHOLE or form in PACKED, "the run file was checked"
            values = FrozenWeight(values, form).dense(torch.float32)
        if f"{path}.{UP}" in adapters:
            down, up = (torch.from_numpy(adapters[f"{path}.{kind}"]) for kind in (DOWN, UP))
            values = merged(values, down, up, lora)
        found[name] = values.numpy()
    return found
