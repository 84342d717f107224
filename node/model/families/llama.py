"""Llama and families like it: RMSNorm, rotary positions, grouped-query attention, a gated feed-forward.

Mistral, Qwen2, Qwen3, SmolLM3, OLMo 2 and Gemma 3 differ from Llama by keys of `[model]`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from node.config.schema import MOST_LAYERS, MOST_POSITIONS, MOST_SIZE, ModelSection
from node.model.families.config_json import ConfigReader, shortened_value
from node.model.families.family import Family, ParameterSpec
from wire.errors import ConfigError

GEMMA = "gemma3_text"
_EPS_BY_DEFAULT = {"olmo2": 1e-5, "olmoe": 1e-5, "mixtral": 1e-5}
_THETA_BY_DEFAULT = {"smollm3": 2_000_000.0, GEMMA: 1_000_000.0, "mixtral": 1_000_000.0}
_WINDOW_BY_DEFAULT = {"mistral": 4096, GEMMA: 4096, "mixtral": None, "gpt_oss": 128}
"""The default windows of families that use them without `use_sliding_window`."""
_WIDTH_BY_DEFAULT = {"qwen3": 128, GEMMA: 256}
_KV_HEADS_BY_DEFAULT = {
    **{"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4, GEMMA: 4},
    **{"mixtral": 8, "qwen3_moe": 4},
}
_WITHOUT_WINDOW = ("llama", "olmo2", "olmoe", "qwen3_moe")
SLIDING = "sliding_attention"
FULL = "full_attention"
_BLOCK = {
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


class Llama(Family):
    """Llama. `ModelSection` has options for biases of queries, keys and values, norms of queries and keys,
    norms of outputs, a window, another scale of the scores and a GELU gate."""

    name = "llama"
    options: ClassVar[tuple[str, ...]] = (
        *("head_width", "rope_theta", "rope_scaling", "rope_factor", "rope_low", "rope_high"),
        *("rope_beta_fast", "rope_beta_slow", "rope_truncate", "rope_attention"),
        *("rope_original", "no_rope", "qkv_bias", "qk_norm", "norm_place", "norm_offset", "window"),
        *("no_window", "window_theta", "query_scale", "activation", "scaled_embedding"),
    )
    choices: ClassVar = {
        "rope_scaling": ("none", "linear", "llama3", "yarn"),
        "qk_norm": ("none", "head", "full"),
        "norm_place": ("input", "output", "both"),
        "activation": ("silu", "gelu"),
    }
    attention_inputs = ("query", "key", "value")
    ffn_inputs = ("gate", "up")
    norm_has_bias = False
    rotates = True
    model_types: ClassVar = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        GEMMA: "Gemma3ForCausalLM",
    }
    tied_types: ClassVar[tuple[str, ...]] = ("smollm3", GEMMA)
    tokenizers: ClassVar = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", GEMMA: "GemmaTokenizer"}

    def attention(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        """The parameters of attention's half of a block."""
        widths = {"query": model.q_width, "key": self.kv_width(model), "value": self.kv_width(model)}
        inputs = [self.into(name, width, model, bias=model.qkv_bias) for name, width in widths.items()]
        if model.qk_norm != "none":
            normed = dict.fromkeys(widths, model.width) if model.qk_norm == "head" else widths
            inputs += [self.norm(f"{name}_norm", model, normed[name]) for name in ("query", "key")]
        return (
            *self.norm("attention_norm", model),
            *(spec for specs in inputs for spec in specs),
            *self.out_of("attention_output", model.q_width, model, bias=model.all_biases),
            *(self.norm("attention_output_norm", model) if model.norm_place == "both" else ()),
        )

    def block(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        return (
            *self.attention(model),
            *self.norm("ffn_norm", model),
            *self.into("gate", model.ffn, model, bias=False),
            *self.into("up", model.ffn, model, bias=False),
            *self.out_of("down", model.ffn, model, bias=False),
            *(self.norm("ffn_output_norm", model) if model.norm_place == "both" else ()),
        )

    def kv_heads(self, model: ModelSection) -> int:
        return model.kv_heads

    def problems(self, model: ModelSection) -> Iterator[str]:
        uneven = list(super().problems(model))
        yield from uneven
        if not uneven and model.width % 2:
            yield (
                f"model.hidden / model.heads ({model.width}) must be even: rotary position "
                "embedding turns pairs of channels"
            )
        if model.heads % model.kv_heads:
            yield f"model.heads ({model.heads}) must be a multiple of model.kv_heads ({model.kv_heads})"
        if model.rope_factor != 1 and model.rope_scaling == "none":
            yield f"model.rope_factor ({model.rope_factor}) needs model.rope_scaling: set it too"
        if model.no_window and not model.window:
            yield "model.no_window names blocks without the window: set model.window too"
        for key in ("no_rope", "no_window"):
            if any(not 0 <= block < model.layers for block in getattr(model, key)):
                yield f"model.{key} must name blocks from 0 to {model.layers - 1}, got {getattr(model, key)}"
        if not 0 < model.rope_theta < math.inf:
            yield f"model.rope_theta must be a finite number above 0, got {model.rope_theta}"
        for key in ("window", "query_scale", "window_theta", "rope_attention"):
            if not 0 <= getattr(model, key) < math.inf:
                yield f"model.{key} must be a finite number of at least 0, got {getattr(model, key)}"
        if not 0 < model.rope_beta_slow <= model.rope_beta_fast < math.inf:
            yield (
                f"model.rope_beta_slow ({model.rope_beta_slow}) must be above 0 and at most "
                f"model.rope_beta_fast ({model.rope_beta_fast})"
            )
        if model.rope_scaling == "yarn" and (model.rope_theta <= 1 or model.rope_original < 1):
            yield "model.rope_scaling yarn needs rope_theta above 1 and rope_original of at least 1"

    def paths(self, model: ModelSection) -> Mapping[str, str]:
        block = _BLOCK | _NORMS[model.norm_place]
        return {
            "tokens": "model.embed_tokens",
            **{layer: f"model.layers.{{}}.{path}" for layer, path in block.items()},
            "norm": "model.norm",
            "output": "lm_head",
        }

    def model_type(self, model: ModelSection) -> str:
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
            # Both values exist.
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

    def read_config(self, reader: ConfigReader, kind: str) -> dict[str, Any]:
        reader.must_be("hidden_act", "silu", "swish")
        reader.must_be("attention_bias", False)
        reader.must_be("mlp_bias", False)
        reader.must_be("partial_rotary_factor", 1.0)
        hidden, heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
        layers = reader.whole("num_hidden_layers", most=MOST_LAYERS)
        width = reader.whole("head_dim", _WIDTH_BY_DEFAULT.get(kind, max(1, hidden // heads)))
        if kind in ("llama", GEMMA) and hidden % heads:
            raise reader.refused("hidden_size", f"a multiple of num_attention_heads ({heads})")
        # A null means one per head. In some families an absent key means something else.
        is_null = "num_key_value_heads" in reader.config and kind not in ("mistral", "mixtral", GEMMA)
        kv_heads = reader.whole(
            "num_key_value_heads", heads if is_null else _KV_HEADS_BY_DEFAULT.get(kind, heads)
        )
        no_rope = _no_rope(reader, layers) if kind == "smollm3" else ()
        return {
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
            **windows(reader, kind, layers, no_rope),
            **(_gemma(reader, width) if kind == GEMMA else _rope(reader, kind)),
        }

    def write_config(
        self, model: ModelSection, kind: str, common: Mapping[str, Any], rest: Mapping[str, Any] | None
    ) -> dict[str, Any]:
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
        if rest is not None:
            # transformers before 5 and other programs do not read `rope_parameters`, and would take defaults.
            older = dict(written_rope(model)) if "rope_parameters" in rest else {}
            return {**rest, **common, **sizes, **older}
        extra: dict[str, Any] = {
            "max_position_embeddings": model.sequence,
            "attention_bias": False,
            **dict(written_rope(model)),
        }
        if model.window:
            extra["sliding_window"] = model.window
        if kind == GEMMA:
            extra |= {
                "layer_types": [
                    FULL if index in model.no_window else SLIDING for index in range(model.layers)
                ],
                "query_pre_attn_scalar": model.query_scale or model.width,
            }
        if kind == "smollm3":
            extra["no_rope_layers"] = [int(index not in model.no_rope) for index in range(model.layers)]
            extra["use_sliding_window"] = False
        # No token has a special meaning, but the families' defaults name some.
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return {**tokens, **common, **sizes, **extra}


def _gemma(reader: ConfigReader, width: int) -> dict[str, Any]:
    """The features of Gemma 3: norms of 1 + weight, a GELU gate, scaled embeddings, two RoPE bases."""
    reader.must_be("hidden_activation", "gelu_pytorch_tanh")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.get(key) is not None:
            raise reader.refused(key, "null")
    reader.must_be("use_bidirectional_attention", False)
    scale = reader.whole("query_pre_attn_scalar", 256)
    # transformers 5 writes one set of values for each kind of block. `rope_scaling` belongs to full
    # attention. From files without these sets it reads `rope_type` but not `type`, and never `truncate`.
    both = reader.object("rope_parameters")
    if both.config.keys() - {FULL, SLIDING}:
        raise reader.refused("rope_parameters", f"an object with {FULL} and {SLIDING}")
    full, sliding = both.object(FULL), both.object(SLIDING)
    if _rope_type(sliding) != "default":
        raise reader.refused("rope_parameters", f"rope_type default for {SLIDING}")
    scaling = reader.object("rope_scaling")
    key = "rope_scaling" if scaling.config else "rope_parameters"
    default = full.config if reader.get("rope_parameters") is not None else {"rope_type": "default"}
    given = ConfigReader({**default, **scaling.config, "truncate": True}, f"{reader.where}: {key}")
    return {
        "norm_offset": True,
        "activation": "gelu",
        "scaled_embedding": True,
        "query_scale": 0 if scale == width else scale,
        "window_theta": sliding.number("rope_theta", reader.number("rope_local_base_freq", 10_000.0)),
        **rope_of(given, reader.number("rope_theta", _THETA_BY_DEFAULT[GEMMA])),
    }


def windows(reader: ConfigReader, kind: str, layers: int, no_rope: Sequence[int] = ()) -> dict[str, Any]:
    """The sliding window, and the blocks without it."""
    types = reader.get("layer_types")
    for name in types if isinstance(types, list) else ():
        if name not in (FULL, SLIDING):
            raise ConfigError(
                f"{reader.where}: layer_types has {shortened_value(name)}, which thinwire cannot train; "
                f"expected {FULL} or {SLIDING}"
            )
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise reader.refused("layer_types", f"a name for each of num_hidden_layers ({layers})")
    if kind in _WITHOUT_WINDOW:
        return {}
    window = reader.config.get("sliding_window", _WINDOW_BY_DEFAULT.get(kind))
    used = kind in _WINDOW_BY_DEFAULT or reader.flag("use_sliding_window", False)
    if types is not None:
        slides = [name == SLIDING for name in types]
        if any(slides) and not used:
            raise reader.refused("layer_types", f"no {SLIDING} without use_sliding_window")
        if kind in ("mistral", "mixtral") and not all(slides):
            raise reader.refused("layer_types", f"{SLIDING} for every block of a {kind}")
    elif kind == GEMMA:
        every = reader.whole("sliding_window_pattern", 6)
        slides = [(index + 1) % every != 0 for index in range(layers)]
    elif kind in ("mistral", "mixtral"):
        slides = [True] * layers
    elif kind == "gpt_oss":
        slides = [index % 2 == 0 for index in range(layers)]
    elif kind == "smollm3":
        slides = [used and index in no_rope for index in range(layers)]
    else:
        first = reader.config.get("max_window_layers")
        first = 28 if first is None else first
        if type(first) is not int or not 0 <= first <= MOST_SIZE:
            raise reader.refused("max_window_layers", "a whole number of at least 0")
        slides = [used and index >= first for index in range(layers)]
    if not any(slides) or (window is None and kind not in (GEMMA, "gpt_oss")):
        return {}
    full = tuple(index for index, windowed in enumerate(slides) if not windowed)
    return {"window": reader.whole("sliding_window", window, MOST_POSITIONS), "no_window": full}


def _no_rope(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """The blocks without rotary embedding: those with 0 in `no_rope_layers`, by default every 4th."""
    given = reader.get("no_rope_layers")
    if given is None:
        interval = reader.whole("no_rope_layer_interval", 4)
        given = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(given, list) or len(given) != layers or any(turns not in (0, 1) for turns in given):
        raise reader.refused("no_rope_layers", f"0 or 1 for each of num_hidden_layers ({layers})")
    return tuple(index for index, turns in enumerate(given) if not turns)


def _rope(reader: ConfigReader, kind: str) -> dict[str, Any]:
    """The rotary keys in both formats: `rope_theta` with `rope_scaling`, and `rope_parameters` of
    transformers 5."""
    given = reader.object("rope_scaling")
    if not given.config:
        given = reader.object("rope_parameters")
    theta = reader.number("rope_theta", _THETA_BY_DEFAULT.get(kind, 10_000.0))
    return rope_of(with_positions(given, reader), theta, positions(reader))


def positions(reader: ConfigReader) -> int | None:
    """The value of `original_max_position_embeddings` for a scaling that does not set it."""
    longest: int | None = reader.get(
        "original_max_position_embeddings", reader.get("max_position_embeddings")
    )
    return longest


def with_positions(given: ConfigReader, reader: ConfigReader) -> ConfigReader:
    """The rotary values. An outer `original_max_position_embeddings` overrides theirs."""
    outer = reader.get("original_max_position_embeddings")
    if outer is None:
        return given
    return ConfigReader({**given.config, "original_max_position_embeddings": outer}, given.where)


def rope_of(given: ConfigReader, theta: float, longest: int | None = None) -> dict[str, Any]:
    """The keys of `[model]` for these rotary values.

    Args:
        theta: used if `rope_theta` is absent.
        longest: used if `original_max_position_embeddings` is absent.
    """
    given.must_be("partial_rotary_factor", 1.0)
    for key in (FULL, SLIDING):
        if key in given.config:
            raise given.refused(key, "one set of values for all blocks")
    scaling = _rope_type(given)
    keys: dict[str, Any] = {"rope_theta": given.number("rope_theta", theta), "rope_scaling": "none"}
    if scaling == "default":
        return keys
    if scaling not in ("linear", "llama3", "yarn"):
        raise given.refused(
            "rope_type" if "rope_type" in given.config else "type", "default, linear, llama3 or yarn"
        )
    keys |= {"rope_scaling": scaling, "rope_factor": given.number("factor")}
    if scaling != "linear":
        longest = longest if scaling == "yarn" else None
        keys["rope_original"] = given.whole("original_max_position_embeddings", longest, MOST_POSITIONS)
    if scaling == "llama3":
        keys |= {
            "rope_low": given.number("low_freq_factor"),
            "rope_high": given.number("high_freq_factor"),
        }
    if scaling == "yarn":
        keys |= {
            "rope_beta_fast": given.number("beta_fast", 32.0),
            "rope_beta_slow": given.number("beta_slow", 1.0),
            # transformers treats null as false here.
            "rope_truncate": given.config.get("truncate", True) is not None and given.flag("truncate", True),
            "rope_attention": _yarn_attention(given, keys["rope_factor"]),
        }
    return keys


def _yarn_attention(given: ConfigReader, factor: float) -> float:
    """YaRN's factor for queries and keys; 0 if it follows from the scaling factor alone."""
    if given.get("attention_factor") is not None:
        return given.number("attention_factor")
    if not (given.get("mscale") and given.get("mscale_all_dim")):
        return 0.0
    first, second = (yarn_attention(factor, given.number(key)) for key in ("mscale", "mscale_all_dim"))
    return first / second


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor for queries and keys (arXiv 2309.00071, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_type(given: ConfigReader) -> Any:
    return given.get("rope_type", given.get("type", "default"))


def written_rope(model: ModelSection) -> Iterator[tuple[str, Any]]:
    yield "rope_theta", model.rope_theta
    if model.window_theta:
        yield "rope_local_base_freq", model.window_theta
    if model.rope_scaling == "none":
        return
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": model.rope_low,
            "high_freq_factor": model.rope_high,
        }
    if model.rope_scaling != "linear":
        scaling["original_max_position_embeddings"] = model.rope_original
    if model.rope_scaling == "yarn":
        scaling |= {
            "beta_fast": model.rope_beta_fast,
            "beta_slow": model.rope_beta_slow,
            "truncate": model.rope_truncate,
            **({"attention_factor": model.rope_attention} if model.rope_attention else {}),
        }
    yield "rope_scaling", scaling
