"""Hugging Face model families: what `config.json` means, and the names of the tensors.

`read_config` turns a `config.json` into the keys of `[model]` and refuses what cannot be trained faithfully,
in one line that names the key and its value. `write_config` does the reverse. `tensors` maps a unit's
parameters to the file's tensors: shapes are the same except for GPT-2, whose matrices are transposed.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.config.schema import MOST_LAYERS, MOST_POSITIONS, MOST_SIZE, ModelSection
from node.model.units import EMBED, HEAD, parameter_specs
from node.state.hub import SINGLE
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
_KV_HEADS_BY_DEFAULT = {"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4, GEMMA: 4}
_WITHOUT_WINDOW = ("llama", "olmo2")
_GPT2_OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
"""Keys that transformers takes for the same."""
_NOT_KEPT = ("dtype", "_name_or_path", "name_or_path", "transformers_weights")
_LARGEST_FLOAT = sys.float_info.max
OUTPUT = "lm_head.weight"
"""The head's matrix in a checkpoint."""
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
            return FileTensor(OUTPUT, shape)
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
    if reader.get("vision_config") is not None:
        raise reader.refused("vision_config", "text models only")
    if reader.get("quantization_config") is not None:
        raise reader.refused("quantization_config", "unquantized weights in safetensors")
    reader.must_be("transformers_weights", SINGLE)
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise reader.refused("model_type", f"one of {', '.join(MODEL_TYPES)}")
    positions = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    longest = reader.whole(positions, most=MOST_POSITIONS)
    if sequence is None:
        sequence = min(longest, LONGEST_DEFAULT_SEQUENCE)
    if sequence > longest:
        raise ConfigError(f"model.sequence is {sequence}, but {where} has {positions} {longest}: lower it")
    found = _gpt2(reader) if kind == "gpt2" else _llama(reader, kind)
    return {
        **found,
        "vocab": reader.whole("vocab_size"),
        "sequence": sequence,
        "tied": reader.flag("tie_word_embeddings", kind in _TIED_BY_DEFAULT),
        "init_std": reader.number("initializer_range", 0.02),
    }


@dataclass(frozen=True)
class _Reader:
    """Values of a `config.json` by key. A null is as an absent key."""

    config: Mapping[str, Any]
    where: str

    def refused(self, key: str, expected: str) -> ConfigError:
        value = _short(self.config.get(key))
        return ConfigError(
            f"{self.where}: {key} is {value}, which cannot be trained here; expected {expected}"
        )

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refused(key, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= _LARGEST_FLOAT:
            raise self.refused(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refused(key, "true or false")
        return value

    def object(self, key: str) -> "_Reader":
        """The object under a key, empty if there is none; its own keys are read in the same way."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.refused(key, "an object")
        return _Reader(value, f"{self.where}: {key}")

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse a value that is there and none of these."""
        if self.get(key, allowed[0]) not in allowed:
            raise self.refused(key, " or ".join(map(repr, allowed)))


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _gpt2(reader: _Reader) -> dict[str, Any]:
    reader.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    reader.must_be("scale_attn_weights", True)
    reader.must_be("scale_attn_by_inverse_layer_idx", False)
    reader.must_be("add_cross_attention", False)
    for key, other in _GPT2_OTHER_NAMES.items():
        reader.must_be(other, reader.get(key))
    hidden, heads = reader.whole("n_embd"), reader.whole("n_head")
    return {
        "family": "gpt2",
        "layers": reader.whole("n_layer", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": reader.whole("n_inner", 4 * hidden),
        "norm_eps": reader.number("layer_norm_epsilon", 1e-5),
    }


def _llama(reader: _Reader, kind: str) -> dict[str, Any]:
    reader.must_be("hidden_act", "silu")
    reader.must_be("attention_bias", False)
    reader.must_be("mlp_bias", False)
    reader.must_be("partial_rotary_factor", 1.0)
    hidden, heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    layers = reader.whole("num_hidden_layers", most=MOST_LAYERS)
    width = reader.whole("head_dim", _WIDTH_BY_DEFAULT.get(kind, max(1, hidden // heads)))
    if kind in ("llama", GEMMA) and hidden % heads:
        raise reader.refused("hidden_size", f"a multiple of num_attention_heads ({heads})")
    # A null is as many as heads, which an absent key is in some families.
    is_null = "num_key_value_heads" in reader.config and kind not in ("mistral", GEMMA)
    kv_heads = reader.whole(
        "num_key_value_heads", heads if is_null else _KV_HEADS_BY_DEFAULT.get(kind, heads)
    )
    no_rope = _no_rope(reader, layers) if kind == "smollm3" else ()
    return {
        "family": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_width": 0 if width * heads == hidden else width,
        "ffn": reader.whole("intermediate_size"),
        "norm_eps": reader.number("rms_norm_eps", _EPS_BY_DEFAULT.get(kind, 1e-6)),
        "qkv_bias": kind == "qwen2",
        "qk_norm": {"qwen3": "head", "olmo2": "full", GEMMA: "head"}.get(kind, "none"),
        "norm_place": {"olmo2": "output", GEMMA: "both"}.get(kind, "input"),
        "no_rope": no_rope,
        **_window(reader, kind, layers, no_rope),
        **(_gemma(reader, width) if kind == GEMMA else _rope(reader, kind)),
    }


def _gemma(reader: _Reader, width: int) -> dict[str, Any]:
    """What Gemma 3 has of its own: norms of 1 + weight, a GELU gate, scaled embeddings, two RoPE bases."""
    reader.must_be("hidden_activation", "gelu_pytorch_tanh")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.get(key) is not None:
            raise reader.refused(key, "null")
    reader.must_be("use_bidirectional_attention", False)
    scale = reader.whole("query_pre_attn_scalar", 256)
    # One set for each kind of block, as transformers 5 writes them; `rope_scaling` is that of full attention.
    both = reader.object("rope_parameters")
    if both.config.keys() - {_FULL, _SLIDING}:
        raise reader.refused("rope_parameters", f"an object with {_FULL} and {_SLIDING}")
    full, sliding = both.object(_FULL), both.object(_SLIDING)
    if _rope_type(sliding) != "default":
        raise reader.refused("rope_parameters", f"rope_type default for {_SLIDING}")
    scaling = reader.object("rope_scaling")
    key = "rope_scaling" if scaling.config else "rope_parameters"
    given = _Reader({**full.config, **scaling.config}, f"{reader.where}: {key}")
    return {
        "norm_offset": True,
        "activation": "gelu",
        "scaled_embedding": True,
        "query_scale": 0 if scale == width else scale,
        "window_theta": sliding.number("rope_theta", reader.number("rope_local_base_freq", 10_000.0)),
        **_rope_of(given, reader.number("rope_theta", _THETA_BY_DEFAULT[GEMMA])),
    }


def _window(reader: _Reader, kind: str, layers: int, no_rope: Sequence[int]) -> dict[str, Any]:
    """The sliding window, and the blocks without it."""
    if kind in _WITHOUT_WINDOW:
        return {}
    window = reader.config.get("sliding_window", _WINDOW_BY_DEFAULT.get(kind))
    used = kind in _WINDOW_BY_DEFAULT or reader.flag("use_sliding_window", False)
    types = reader.get("layer_types")
    for name in types if isinstance(types, list) else ():
        if name not in (_FULL, _SLIDING):
            raise ConfigError(
                f"{reader.where}: layer_types has {_short(name)}, which thinwire cannot train; expected "
                f"{_FULL} or {_SLIDING}"
            )
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise reader.refused("layer_types", f"a name for each of num_hidden_layers ({layers})")
    if types is not None:
        slides = [name == _SLIDING for name in types]
        if any(slides) and not used:
            raise reader.refused("layer_types", f"no {_SLIDING} without use_sliding_window")
        if kind == "mistral" and not all(slides):
            raise reader.refused("layer_types", f"{_SLIDING} for every block of a mistral")
    elif kind == GEMMA:
        every = reader.whole("sliding_window_pattern", 6)
        slides = [(index + 1) % every != 0 for index in range(layers)]
    elif kind == "mistral":
        slides = [True] * layers
    elif kind == "smollm3":
        slides = [used and index in no_rope for index in range(layers)]
    else:
        first = reader.config.get("max_window_layers")
        first = 28 if first is None else first
        if type(first) is not int or not 0 <= first <= MOST_SIZE:
            raise reader.refused("max_window_layers", "a whole number of at least 0")
        slides = [used and index >= first for index in range(layers)]
    if not any(slides) or (window is None and kind != GEMMA):
        return {}
    full = tuple(index for index, windowed in enumerate(slides) if not windowed)
    return {"window": reader.whole("sliding_window", window, MOST_POSITIONS), "no_window": full}


def _no_rope(reader: _Reader, layers: int) -> tuple[int, ...]:
    """Blocks without rotary embedding: those with 0 in `no_rope_layers`, by default every 4th."""
    given = reader.get("no_rope_layers")
    if given is None:
        interval = reader.whole("no_rope_layer_interval", 4)
        given = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(given, list) or len(given) != layers or any(turns not in (0, 1) for turns in given):
        raise reader.refused("no_rope_layers", f"0 or 1 for each of num_hidden_layers ({layers})")
    return tuple(index for index, turns in enumerate(given) if not turns)


def _rope(reader: _Reader, kind: str) -> dict[str, Any]:
    """Both forms: `rope_theta` with `rope_scaling`, and `rope_parameters` of transformers 5."""
    given = reader.object("rope_scaling")
    if not given.config:
        given = reader.object("rope_parameters")
    return _rope_of(given, reader.number("rope_theta", _THETA_BY_DEFAULT.get(kind, 10_000.0)))


def _rope_of(given: _Reader, theta: float) -> dict[str, Any]:
    """`theta`: what an object without `rope_theta` has."""
    given.must_be("partial_rotary_factor", 1.0)
    for key in (_FULL, _SLIDING):
        if key in given.config:
            raise given.refused(key, "one set of values for all blocks")
    scaling = _rope_type(given)
    found: dict[str, Any] = {"rope_theta": given.number("rope_theta", theta), "rope_scaling": "none"}
    if scaling == "default":
        return found
    if scaling not in ("linear", "llama3"):
        raise given.refused(
            "rope_type" if "rope_type" in given.config else "type", "default, linear or llama3"
        )
    found |= {"rope_scaling": scaling, "rope_factor": given.number("factor")}
    if scaling == "llama3":
        found |= {
            "rope_low": given.number("low_freq_factor"),
            "rope_high": given.number("high_freq_factor"),
            "rope_original": given.whole("original_max_position_embeddings", most=MOST_POSITIONS),
        }
    return found


def _rope_type(given: _Reader) -> Any:
    return given.get("rope_type", given.get("type", "default"))


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
    rest = _kept(original or {})
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


def _kept(original: Mapping[str, Any]) -> dict[str, Any]:
    """What an export keeps of the `config.json` that a run started from: no paths, and no nulls that
    transformers refuses. A null means something for a window and for tokens."""
    kept = {}
    for key, value in original.items():
        if value is None and key != "sliding_window" and not key.endswith("_token_id"):
            continue
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            value = _kept(value)
        if key not in _NOT_KEPT:
            kept[key] = value
    return kept


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
