"""Adapters of a LoRA run as a folder in PEFT's format. Torch-free; `node.state.merging` merges them.

    OUT/adapter_config.json  adapter_model.safetensors  README.md  tokenizer files

PEFT's `PeftModel.from_pretrained(base, OUT)` loads the folder. It says which base it belongs to: the
checkpoint that the run started from, by its name on the hub, or by its folder's name without the path.
"""

from pathlib import Path
from typing import Any

from node.config.schema import RunConfig
from node.model.families.known import family_of
from node.model.lora_shapes import targets
from node.model.units import block_name
from node.state.families import tensors
from node.state.hub import hub_repository

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
    repository = hub_repository(model.from_)
    base, revision = model.from_ and Path(model.from_).name, None
    if repository is not None:
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
        "fan_in_fan_out": family_of(model).transposes,
        "bias": "none",
        "inference_mode": True,
    }
