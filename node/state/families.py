"""Translates between `[model]` and the `config.json` and tensor names of Hugging Face model families.

`read_config` turns a `config.json` into the keys of `[model]` and refuses what cannot be trained faithfully,
in one line that names the key and its value. `write_config` does the reverse. `tensors` maps a unit's
parameters to the file's tensors. The differences between families are declared in `node.model.families`.
"""

from collections.abc import Mapping
from typing import Any

from node.config.schema import MOST_POSITIONS, ModelSection
from node.model.families.config_json import ConfigReader
from node.model.families.family import FileTensor
from node.model.families.known import FAMILIES, family_of
from node.model.units import is_block, parameter_specs
from node.state.hub import SINGLE
from wire.errors import ConfigError

OUTPUT = "lm_head.weight"
"""The name of the head's matrix in a checkpoint."""
LONGEST_DEFAULT_SEQUENCE = 1024
"""The largest default of `model.sequence`. The default is smaller if the model has fewer positions."""
_NOT_KEPT = (
    *("dtype", "_name_or_path", "name_or_path", "transformers_weights", "quantization_config"),
    "auto_map",  # names files with code, which are not copied
)
_BY_TYPE = {kind: family for family in FAMILIES.values() for kind in family.model_types}


def tensors(model: ModelSection, unit: str) -> dict[str, tuple[FileTensor, ...]]:
    """The file's tensors for each parameter of a unit, in order, by the parameter's name."""
    family = family_of(model)
    number = int(unit.partition(".")[2]) if is_block(unit) else None
    return {spec.name: family.file_tensors(model, spec, number) for spec in parameter_specs(model, unit)}


# ---- config.json to [model]


def read_config(config: Mapping[str, Any], where: str, sequence: int | None = None) -> dict[str, Any]:
    """The keys of `[model]` that a `config.json` sets.

    Args:
        where: the name of the file in messages.
        sequence: the value in the run file, if any.

    Raises ConfigError if a key is missing or the model cannot be trained faithfully.
    """
    reader = ConfigReader(config, where)
    if reader.get("vision_config") is not None:
        raise reader.refused("vision_config", "text models only")
    for key in ("quantization_config", "quantization"):  # the latter is MLX's
        if reader.get(key) is not None and reader.object(key).get("quant_method") != "mxfp4":
            raise reader.refused(key, "weights in safetensors, unquantized or in mxfp4")
    reader.must_be("transformers_weights", SINGLE)
    if config.get("is_causal", True) is not True:
        raise reader.refused("is_causal", "true or a missing key")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _BY_TYPE:
        raise reader.refused("model_type", f"one of {', '.join(_BY_TYPE)}")
    family = _BY_TYPE[kind]
    positions = family.positions_key
    longest = reader.whole(positions, most=MOST_POSITIONS)
    if sequence is None:
        sequence = min(longest, LONGEST_DEFAULT_SEQUENCE)
    if sequence > longest:
        raise ConfigError(f"model.sequence is {sequence}, but {where} has {positions} {longest}: lower it")
    return {
        "family": family.name,
        **family.read_config(reader, kind),
        "vocab": reader.whole("vocab_size"),
        "sequence": sequence,
        "tied": reader.flag("tie_word_embeddings", kind in family.tied_types),
        "init_std": reader.number("initializer_range", 0.02),
    }


# ---- [model] to config.json


def write_config(
    model: ModelSection, dtype: str, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A `config.json` for a model.

    Args:
        dtype: the dtype of the exported weights, such as `float32`.
        original: the `config.json` that the run started from. Keys that do not describe shapes are kept.
    """
    family = family_of(model)
    kind = str((original or {}).get("model_type") or family.model_type(model))
    common = {
        "architectures": [family.model_types[kind]],
        "model_type": kind,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
        "torch_dtype": dtype,
    }
    return family.write_config(model, kind, common, None if original is None else _kept(original))


def _kept(original: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the original `config.json` that an export keeps: no paths, and no nulls that transformers
    refuses. Nulls are meaningful only for a sliding window and for tokens."""
    kept = {}
    for key, value in original.items():
        if value is None and key != "sliding_window" and not key.endswith("_token_id"):
            continue
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            value = _kept(value)
        if key not in _NOT_KEPT:
            kept[key] = value
    return kept
