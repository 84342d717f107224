"""Hugging Face model families: what `config.json` means, and the names of the tensors.

`read_config` turns a `config.json` into the keys of `[model]` and refuses what cannot be trained faithfully,
in one line that names the key and its value. `write_config` does the reverse. `tensors` maps a unit's
parameters to the file's tensors: shapes are the same except for GPT-2, whose matrices are transposed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from node.config.schema import ModelSection
from node.model.units import EMBED, HEAD, parameter_specs
from wire.errors import ConfigError

GEMMA = "gemma3_text"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", GEMMA, "gpt2")
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    GEMMA: "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_TIED_BY_DEFAULT = ("gpt2", "smollm3", GEMMA)
_EPS_BY_DEFAULT = {
    "llama": 1e-6,
    "mistral": 1e-6,
    "qwen2": 1e-6,
    "qwen3": 1e-6,
    "smollm3": 1e-6,
    "olmo2": 1e-5,
}
_THETA_BY_DEFAULT = {"smollm3": 2_000_000.0, GEMMA: 1_000_000.0}
_WINDOW_BY_DEFAULT = {"mistral": 4096, GEMMA: 4096}
_WIDTH_BY_DEFAULT = {"qwen3": 128, GEMMA: 256}
_SLIDING = "sliding_attention"
_FULL = "full_attention"
LONGEST_DEFAULT_SEQUENCE = 1024
"""`sequence` of a run file that does not say it, if the model takes as many positions."""

_LLAMA = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS = {
    "input": {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "output": {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_output_norm": "post_feedforward_layernorm",
    },
}
_GPT2 = {
    "attention_norm": "ln_1",
    "qkv_projection": "attn.c_attn",
    "attention_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A parameter as a checkpoint's tensor."""

    name: str
    shape: tuple[int, ...]
    """In the file. `wpe` may have more rows than a run's `sequence`: the first ones are read."""
    transposed: bool = False
    first_rows: bool = False


def tensors(model: ModelSection, unit: str) -> dict[str, FileTensor]:
    """The file's tensor of each parameter of a unit, by the parameter's name, in their order."""
    return {spec.name: _tensor(model, unit, spec.name, spec.shape) for spec in parameter_specs(model, unit)}


def _tensor(model: ModelSection, unit: str, name: str, shape: tuple[int, ...]) -> FileTensor:
    layer, _, kind = name.rpartition(".")
    gpt2 = model.family == "gpt2"
    if unit == EMBED:
        llama = "model.embed_tokens.weight"
        if not gpt2:
            return FileTensor(llama, shape)
        positions = layer == "positions"
        return FileTensor(f"transformer.{'wpe' if positions else 'wte'}.weight", shape, first_rows=positions)
    if unit == HEAD:
        if layer == "output":
            return FileTensor("lm_head.weight", shape)
        return FileTensor(f"transformer.ln_f.{kind}" if gpt2 else f"model.norm.{kind}", shape)
    index = int(unit.partition(".")[2])
    if gpt2:
        transposed = len(shape) == 2
        return FileTensor(
            f"transformer.h.{index}.{_GPT2[layer]}.{kind}", shape[::-1] if transposed else shape, transposed
        )
    names = _LLAMA | _NORMS[model.norm_place]
    return FileTensor(f"model.layers.{index}.{names[layer]}.{kind}", shape)


# ---- config.json to [model]


def read_config(config: Mapping[str, Any], where: str, sequence: int | None = None) -> dict[str, Any]:
    """The keys of `[model]` that a `config.json` sets.

    Args:
        where: names the file in messages.
        sequence: the run file's, if it says one.

    Raises ConfigError for what is missing or cannot be trained faithfully.
    """
    reader = _Reader(config, where)
    if "vision_config" in config:
        raise reader.refused("vision_config", "text models only")
    if config.get("quantization_config") is not None:
        raise reader.refused("quantization_config", "unquantized weights in safetensors")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise reader.refused("model_type", f"one of {', '.join(MODEL_TYPES)}")
    longest = reader.whole("n_positions" if kind == "gpt2" else "max_position_embeddings")
    if sequence is None:
        sequence = min(longest, LONGEST_DEFAULT_SEQUENCE)
    if sequence > longest:
        raise ConfigError(f"model.sequence is {sequence}, but {where} has positions for {longest}: lower it")
    found = _gpt2(reader) if kind == "gpt2" else _llama(reader, kind)
    return {
        **found,
        "vocab": reader.whole("vocab_size"),
        "sequence": sequence,
        "tied": bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        "init_std": float(config.get("initializer_range", 0.02)),
    }


@dataclass(frozen=True)
class _Reader:
    config: Mapping[str, Any]
    where: str

    def refused(self, key: str, expected: str) -> ConfigError:
        value = repr(self.config.get(key))
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        return ConfigError(
            f"{self.where}: {key} is {shown}, which cannot be trained here; expected {expected}"
        )

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.refused(key, "a whole number from 1")
        return value

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse a value that is there and none of these."""
        if key in self.config and self.config[key] not in allowed:
            raise self.refused(key, " or ".join(map(repr, allowed)))


def _gpt2(reader: _Reader) -> dict[str, Any]:
    reader.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    reader.must_be("scale_attn_weights", True)
    reader.must_be("scale_attn_by_inverse_layer_idx", False)
    reader.must_be("add_cross_attention", False)
    hidden, heads = reader.whole("n_embd"), reader.whole("n_head")
    return {
        "family": "gpt2",
        "layers": reader.whole("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": reader.whole("n_inner", 4 * hidden),
        "norm_eps": float(reader.config.get("layer_norm_epsilon", 1e-5)),
    }


def _llama(reader: _Reader, kind: str) -> dict[str, Any]:
    config = reader.config
    reader.must_be("hidden_act", "silu")
    reader.must_be("attention_bias", False, None)
    reader.must_be("mlp_bias", False, None)
    reader.must_be("partial_rotary_factor", 1.0, 1, None)
    hidden, heads, layers = (
        reader.whole(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    width = reader.whole("head_dim", _WIDTH_BY_DEFAULT.get(kind, hidden // heads))
    return {
        "family": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": reader.whole("num_key_value_heads", heads),
        "head_width": 0 if width * heads == hidden else width,
        "ffn": reader.whole("intermediate_size"),
        "norm_eps": float(config.get("rms_norm_eps", _EPS_BY_DEFAULT.get(kind, 1e-6))),
        "qkv_bias": kind == "qwen2",
        "qk_norm": {"qwen3": "head", "olmo2": "full", GEMMA: "head"}.get(kind, "none"),
        "norm_place": {"olmo2": "output", GEMMA: "both"}.get(kind, "input"),
        "no_rope": _no_rope(reader, layers) if kind == "smollm3" else (),
        **_window(reader, kind, layers),
        **(_gemma(reader, width) if kind == GEMMA else _rope(reader, kind)),
    }


def _gemma(reader: _Reader, width: int) -> dict[str, Any]:
    """What Gemma 3 has of its own: norms of 1 + weight, a GELU gate, scaled embeddings, two RoPE bases."""
    config = reader.config
    reader.must_be("hidden_activation", "gelu_pytorch_tanh")
    reader.must_be("attn_logit_softcapping", None)
    reader.must_be("final_logit_softcapping", None)
    reader.must_be("use_bidirectional_attention", False, None)
    scale = config.get("query_pre_attn_scalar", 256)
    if type(scale) is not int or scale < 1:
        raise reader.refused("query_pre_attn_scalar", "a whole number from 1")
    both = config.get("rope_parameters")
    if isinstance(both, dict) and _FULL in both:
        # One set for each kind of block, as transformers 5 writes them.
        of_windows = both.get(_SLIDING) or {}
        if of_windows.get("rope_type", "default") != "default":
            raise reader.refused("rope_parameters", f"rope_type default for {_SLIDING}")
        local = of_windows.get("rope_theta", 10_000.0)
        rope = _rope(_Reader({**config, "rope_parameters": both[_FULL]}, reader.where), GEMMA)
    else:
        local = config.get("rope_local_base_freq", 10_000.0)
        rope = _rope(reader, GEMMA)
    return {
        "norm_offset": True,
        "activation": "gelu",
        "scaled_embedding": True,
        "query_scale": 0 if scale == width else scale,
        "window_theta": float(local),
        **rope,
    }


def _window(reader: _Reader, kind: str, layers: int) -> dict[str, Any]:
    """The sliding window, and the blocks without it."""
    config = reader.config
    window = config.get("sliding_window", _WINDOW_BY_DEFAULT.get(kind))
    layer_types = config.get("layer_types")
    for name in set(layer_types or ()) - {_FULL, _SLIDING}:
        raise ConfigError(
            f"{reader.where}: layer_types has {name!r}, which thinwire cannot train; expected {_FULL} or "
            f"{_SLIDING}"
        )
    if layer_types:
        slides = [name == _SLIDING for name in layer_types]
    elif kind == GEMMA:
        every = reader.whole("sliding_window_pattern", 6)
        slides = [(index + 1) % every != 0 for index in range(layers)]
    elif kind == "mistral":  # always uses its window, the others if they say so
        slides = [True] * layers
    else:
        used, first = bool(config.get("use_sliding_window", False)), config.get("max_window_layers", 28)
        slides = [used and index >= first for index in range(layers)]
    if window is None or not any(slides):
        return {}
    if len(slides) != layers:
        raise reader.refused("layer_types", f"a list of {layers} names")
    full = tuple(index for index, windowed in enumerate(slides) if not windowed)
    return {"window": reader.whole("sliding_window", window), "no_window": full}


def _no_rope(reader: _Reader, layers: int) -> tuple[int, ...]:
    """Blocks without rotary embedding: those with 0 in `no_rope_layers`, by default every 4th."""
    given = reader.config.get("no_rope_layers")
    if given is None:
        interval = reader.whole("no_rope_layer_interval", 4)
        given = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(given, list) or len(given) != layers:
        raise reader.refused("no_rope_layers", f"a list of {layers} numbers")
    return tuple(index for index, turns in enumerate(given) if not turns)


def _rope(reader: _Reader, kind: str) -> dict[str, Any]:
    """Both forms: `rope_theta` with `rope_scaling`, and `rope_parameters` of transformers 5."""
    config = reader.config
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise reader.refused(key, "an object")
    theta = given.get("rope_theta", config.get("rope_theta", _THETA_BY_DEFAULT.get(kind, 10_000.0)))
    scaling = given.get("rope_type", given.get("type", "default"))
    found: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": "none"}
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise reader.refused(key, "a partial_rotary_factor of 1")
    if scaling == "default":
        return found
    names = {"factor": "rope_factor"}
    if scaling == "llama3":
        names |= {
            "low_freq_factor": "rope_low",
            "high_freq_factor": "rope_high",
            "original_max_position_embeddings": "rope_original",
        }
    elif scaling != "linear":
        raise reader.refused(key, "rope_type default, linear or llama3")
    for name, field in names.items():
        if type(given.get(name)) not in (int, float):
            raise reader.refused(key, f"a number in {name}")
        found[field] = int(given[name]) if field == "rope_original" else float(given[name])
    return found | {"rope_scaling": scaling}


# ---- [model] to config.json


def model_type(model: ModelSection) -> str:
    """The family that has exactly a model's features. Raises ConfigError if none has."""
    if model.family == "gpt2":
        return "gpt2"
    own = {
        "qkv_bias": model.qkv_bias,
        "qk_norm": model.qk_norm,
        "norm_place": model.norm_place,
        "no_rope": bool(model.no_rope),
        "window": model.window > 0,
        "no_window": bool(model.no_window),
        "norm_offset": model.norm_offset,
        "activation": model.activation,
        "scaled_embedding": model.scaled_embedding,
        "window_theta": model.window_theta > 0,
        "query_scale": model.query_scale > 0,
    }
    plain = {**dict.fromkeys(own, False), "qk_norm": "none", "norm_place": "input", "activation": "silu"}
    gemma = {
        "qk_norm": "head",
        "norm_place": "both",
        "norm_offset": True,
        "activation": "gelu",
        "scaled_embedding": True,
        "window": True,
        "window_theta": True,
        # Either way.
        "no_window": own["no_window"],
        "query_scale": own["query_scale"],
    }
    families: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"window": True},
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": "head"},
        "olmo2": {"qk_norm": "full", "norm_place": "output"},
        "smollm3": {"no_rope": True},
        GEMMA: gemma,
    }
    for kind, features in families.items():
        if own == plain | features:
            return kind
    named = ", ".join(f"{key} {getattr(model, key)}" for key in own if own[key] != plain[key])
    raise ConfigError(f"no Hugging Face family has all of model.{named}: no export is possible")


def write_config(
    model: ModelSection, dtype: str, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A `config.json` for a model.

    Args:
        dtype: of the exported weights, as `float32`.
        original: the `config.json` that the run started from; keys that are not about shapes stay.
    """
    kind = str((original or {}).get("model_type") or model_type(model))
    common = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std,
        "torch_dtype": dtype,
    }
    rest = {key: value for key, value in (original or {}).items() if key not in ("dtype", "_name_or_path")}
    if kind == "gpt2":
        sizes = {
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "n_positions": model.sequence,
            # The same: llama.cpp's converter reads it, though transformers no longer writes it.
            "n_ctx": model.sequence,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
        }
        return {**({"bos_token_id": None, "eos_token_id": None} | rest), **common, **sizes}
    sizes = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width,
        "intermediate_size": model.ffn,
        "rms_norm_eps": model.norm_eps,
        **({"hidden_activation": "gelu_pytorch_tanh"} if kind == GEMMA else {"hidden_act": "silu"}),
    }
    if original is not None:
        return {**rest, **common, **sizes}
    extra: dict[str, Any] = {
        "max_position_embeddings": model.sequence,
        "rope_theta": model.rope_theta,
        "attention_bias": False,
        **dict(_written_rope(model)),
    }
    if model.window:
        extra["sliding_window"] = model.window
    if kind == GEMMA:
        extra |= {
            "layer_types": [_FULL if index in model.no_window else _SLIDING for index in range(model.layers)],
            "rope_local_base_freq": model.window_theta,
            "query_pre_attn_scalar": model.query_scale or model.width,
        }
    if kind == "smollm3":
        extra["no_rope_layers"] = [int(index not in model.no_rope) for index in range(model.layers)]
        extra["use_sliding_window"] = False
    # There is no token with a special meaning; the families' own defaults name some.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {**tokens, **common, **sizes, **extra}


def _written_rope(model: ModelSection) -> Iterator[tuple[str, Any]]:
    if model.rope_scaling == "none":
        return
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low,
            "high_freq_factor": model.rope_high,
            "original_max_position_embeddings": model.rope_original,
        }
    yield "rope_scaling", scaling
