"""Writes the adapters of a LoRA run as a folder in PEFT's format. It does not need torch, unlike
`node.state.merging`, which merges them.

    OUT/adapter_config.json  adapter_model.safetensors  README.md  tokenizer files

PEFT's `PeftModel.from_pretrained(base, OUT)` loads the folder. It names its base, the checkpoint that the run
started from: by its name on the hub, or by its folder's name without the path.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from node.config.schema import RunConfig
from node.model.families.family import FileTensor, ParameterSpec
from node.model.families.known import family_of
from node.model.lora_shapes import DOWN, UP, targets, trained_specs
from node.model.units import block_name
from node.state.families import tensors
from node.state.hub import hub_repository

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def adapter_tensors(config: RunConfig, unit: str) -> dict[str, tuple[FileTensor, ...]]:
    """PEFT's tensors for a unit's adapters, by the names in `node.model.lora_shapes.trained_specs`.

    Experts with separate tensors in a checkpoint have separate adapters. A fused tensor has one adapter for
    all its experts and projections.
    """
    whole, rank = tensors(config.model, unit), config.lora.rank
    result: dict[str, tuple[FileTensor, ...]] = {}
    for spec in trained_specs(config.model, config.lora, unit):
        path, _, kind = spec.name.rpartition(".")
        base = whole[f"{path}.weight"]
        if spec.experts and len(base) == 1:
            result[spec.name] = (_fused(config, base[0], spec, kind),)
            continue
        rows = spec.shape[0] // len(base)
        result[spec.name] = tuple(
            FileTensor(
                f"{_PREFIX}{tensor.name.removesuffix('.weight')}.{kind}.weight",
                (rows, spec.shape[1]) if kind == UP else (rank, spec.shape[1]),
                part=tensor.part,
                parts=tensor.parts,
            )
            for tensor in base
        )
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fused(FileTensor):
    """An adapter's matrix within PEFT's tensor, which holds the ranks of all experts and projections:
    A as [experts, projections, rank, inputs], B as [interleaved outputs, projections, rank, experts]."""

    experts: int
    rank: int

    def _own(self, array: np.ndarray) -> np.ndarray:
        if self.name.endswith(f".{DOWN}.weight"):
            return array.reshape(self.experts, self.turns, self.rank, -1)[:, self.turn]
        outputs = array.reshape(-1, self.turns, self.turns, self.rank, self.experts)
        return outputs[:, self.turn, self.turn].transpose(2, 0, 1)


def _fused(config: RunConfig, base: FileTensor, spec: ParameterSpec, kind: str) -> _Fused:
    rank, width = config.lora.rank, base.turns * config.lora.rank * spec.experts
    shape = (width, spec.shape[1]) if kind == DOWN else (base.shape[-1], width)
    module, _, parameter = base.name.rpartition(".")
    adapted = _fused_names(config)
    # PEFT wraps a module once for each parameter that has adapters; the first is the innermost.
    inner = ".base_layer" * (len(adapted) - 1 - adapted.index(parameter))
    name = f"{_PREFIX}{module}{inner}.{kind}.weight"
    return _Fused(name, shape, turn=base.turn, turns=base.turns, experts=spec.experts, rank=rank)


def _fused_names(config: RunConfig) -> list[str]:
    """The parameters with adapters in the module of fused experts."""
    bases = (_base(config, name) for name in targets(config.model, config.lora))
    return list(dict.fromkeys(base.name.rpartition(".")[2] for base in bases if base.name[-7:] != ".weight"))


def _base(config: RunConfig, name: str) -> FileTensor:
    """The first tensor of a projection in a checkpoint."""
    return tensors(config.model, block_name(0))[f"{name}.weight"][0]


def adapter_config(config: RunConfig) -> dict[str, Any]:
    model, lora = config.model, config.lora
    apart = family_of(model).parameters_in_peft(model)
    modules, parameters = [], dict[str, int]()
    for target in targets(model, lora):
        tensor = _base(config, target)
        if target in apart:
            parameters[".".join(tensor.name.split(".")[-3:])] = tensor.turns
        else:
            # Two parts of the name, because GPT-2 has c_proj in both halves of a block; one part for experts,
            # because they are numbered.
            modules.append(".".join(tensor.name.split(".")[-2 if tensor.parts > 1 else -3 : -1]))
    fused = {rf".*\.{name.rpartition('.')[2]}": turns for name, turns in parameters.items() if turns > 1}
    patterns = {
        "target_parameters": list(parameters),
        "rank_pattern": {name: turns * lora.rank for name, turns in fused.items()},
        "alpha_pattern": {name: turns * lora.alpha for name, turns in fused.items()},
    }
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
        **(patterns if parameters else {}),
        "fan_in_fan_out": family_of(model).transposes,
        "bias": "none",
        "inference_mode": True,
    }
