"""Any key of `config.json` absent, null or of another type: as transformers reads it, or one line with it."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from node.config.schema import DataSection, ModelSection, RunConfig
from node.model.llama_block import rotary_frequencies, rotary_scale
from node.run_file.validate import problems
from node.state.families import read_config
from tests.support.families import CONFIGS, SIZES
from wire.errors import ConfigError

ABSENT = object()
ROUTED_TYPES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
VALUES = (
    *(ABSENT, None, True, False, 0, -1, 3, 2.5, float("nan"), float("inf"), 10**400),
    *("wide", [], ["full_attention"], {}, {"factor": None}),
)
OLDER = {
    "rope_theta": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10_000.0,
    "torch_dtype": "float32",
    "original_max_position_embeddings": 64,
}
"""Keys of older versions, which configs of transformers 5 do not have."""


def config_class(family: str) -> Any:
    import transformers  # takes seconds, which only some workers spend

    name = CONFIGS[family][0]
    return getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")


def base(family: str) -> dict[str, Any]:
    """A `config.json`, with the keys of older versions as they were written then."""
    config = config_class(family)(**{**SIZES, **CONFIGS[family][1]}).to_dict()
    return json.loads(
        json.dumps({key: value for key, value in config.items() if key != "transformers_version"})
    )


def changes(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each key and each key of the values of RoPE; the config with another value there, and with none."""

    def places(values: dict[str, Any], put: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        for key in {**values, **(OLDER if values is config else {})}:
            if key != "model_type":
                yield (
                    key,
                    lambda value, key=key: put(
                        {k: v for k, v in values.items() if k != key}
                        | ({} if value is ABSENT else {key: value})
                    ),
                )
            if isinstance(values.get(key), dict):
                yield from places(values[key], lambda inner, key=key: put({**values, key: inner}))

    for key, changed in places(config, lambda values: values):
        for value in VALUES:
            yield key, changed(value), changed(ABSENT)


def rounded(frequencies: Tensor) -> list[float]:
    return [float(f"{value:.5e}") for value in frequencies.tolist()]


def as_read(found: dict[str, Any]) -> dict[str, Any]:
    """What decides how a model computes, from our keys."""
    model = ModelSection(**found)
    windows = [model.window if model.window and i not in model.no_window else 0 for i in range(model.layers)]
    rope = {"theta": model.rope_theta, "type": model.rope_scaling, "part": 1.0}
    if model.rope_scaling == "yarn":
        rope |= {"frequencies": rounded(rotary_frequencies(model)), "scale": rotary_scale(model)}
    elif model.rope_scaling != "none":
        rope["factor"] = model.rope_factor
    if model.rope_scaling == "llama3":
        rope |= {"low": model.rope_low, "high": model.rope_high, "original": model.rope_original}
    if model.window_theta:
        rope["window_theta"] = model.window_theta
    return {
        **{name: getattr(model, name) for name in ("layers", "hidden", "heads", "ffn", "vocab", "tied")},
        **{name: getattr(model, name) for name in ("norm_eps", "init_std")},
        "kv_heads": model.kv_heads,
        "width": model.width,
        "windows": windows,
        "no_rope": model.no_rope,
        "rope": rope if model.family != "gpt2" else {},
        "experts": (model.experts, model.experts_per_token, model.normalized_routing, model.swiglu_limit),
        "query_scale": model.query_scale or model.width,
    }


def as_transformers(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The same from a config of transformers. Raises what that raises."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes seconds, as transformers does

    made = config_class(family)(**copy.deepcopy(config))  # it changes what it is given
    layers = made.num_hidden_layers
    gpt2 = made.model_type == "gpt2"
    types = getattr(made, "layer_types", None)
    windows = [0] * layers
    window = getattr(made, "sliding_window", None)
    if made.model_type in ("mistral", "mixtral"):
        windows = [window or 0] * layers
    elif types and made.model_type in ("qwen2", "qwen3", "smollm3", "gemma3_text", "gpt_oss"):
        used = getattr(made, "use_sliding_window", True)
        windows = [window if used and name == "sliding_attention" else 0 for name in types]
    rope: dict[str, Any] = {}
    if not gpt2:
        made.standardize_rope_params()  # once more, as models do
        given = made.rope_parameters
        full = given["full_attention"] if made.model_type == "gemma3_text" else given
        kind = full["rope_type"]
        if None in (kind, full["rope_theta"]) or (kind != "default" and full["factor"] is None):
            raise TypeError("its model cannot be made")
        rope = {"theta": full["rope_theta"], "type": "none" if kind == "default" else kind}
        if kind in ("linear", "llama3"):
            rope["factor"] = full["factor"]
        if kind == "yarn":
            frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](made)
            rope |= {"frequencies": rounded(frequencies), "scale": scale}
        if kind == "llama3":
            rope |= {"low": full["low_freq_factor"], "high": full["high_freq_factor"]}
            rope["original"] = full["original_max_position_embeddings"]
            if rope["original"] is None:
                raise TypeError("its model cannot be made")
        if made.model_type == "gemma3_text":
            rope["window_theta"] = given["sliding_attention"]["rope_theta"]
            if rope["window_theta"] is None:
                raise TypeError("its model cannot be made")
        rope["part"] = full.get("partial_rotary_factor") or 1.0
    width = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
    no_rope = getattr(made, "no_rope_layers", None) or [1] * layers
    ffn = (made.n_inner or 4 * made.n_embd) if gpt2 else made.intermediate_size
    experts: tuple[Any, ...] = 0, 0, True, 0.0
    if made.model_type in ROUTED_TYPES:
        ffn = getattr(made, "moe_intermediate_size", ffn)
        limit = getattr(made, "swiglu_limit", 0.0)
        normalized = getattr(made, "norm_topk_prob", True)
        experts = made.num_local_experts, made.num_experts_per_tok, normalized, limit
        if None in experts:
            raise TypeError("its model cannot be made")
    return {
        "layers": layers,
        "hidden": made.hidden_size,
        "heads": made.num_attention_heads,
        "ffn": ffn,
        "vocab": made.vocab_size,
        "tied": made.tie_word_embeddings,
        "norm_eps": made.layer_norm_epsilon if gpt2 else made.rms_norm_eps,
        "init_std": made.initializer_range,
        "kv_heads": made.num_attention_heads if gpt2 else made.num_key_value_heads,
        "width": width,
        "windows": windows,
        "no_rope": tuple(index for index, turns in enumerate(no_rope) if not turns),
        "rope": rope,
        "experts": experts,
        "query_scale": getattr(made, "query_pre_attn_scalar", width),
    }


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_an_empty_scaling_of_gpt_oss_is_read_as_transformers_does(key: str) -> None:
    config = {name: value for name, value in base("gpt_oss").items() if name != "rope_parameters"}
    config[key] = {}
    assert as_read(read_config(config, "config.json", 64)) == as_transformers("gpt_oss", config)


def reading(config: dict[str, Any]) -> dict[str, Any] | None:
    """What is read, or None if it is refused."""
    try:
        return as_read(read_config(config, "config.json", 64))
    except ConfigError:
        return None


@pytest.mark.filterwarnings("ignore")  # transformers' own, about what it is given
@pytest.mark.parametrize("family", CONFIGS)
def test_any_key_is_read_as_transformers_does_or_named_in_one_line(family: str) -> None:
    config = base(family)
    whole = as_read(read_config(config, "config.json", 64))
    assert whole == as_transformers(family, config)
    tried = refused = compared = 0
    for key, changed, absent in changes(config):
        tried += 1
        try:
            found = read_config(json.loads(json.dumps(changed)), "config.json", 64)
        except ConfigError as error:
            assert key in str(error) and "\n" not in str(error) and len(str(error)) < 400, (key, error)
            refused += 1
            continue
        section = RunConfig(model=ModelSection(**found), data=DataSection(tokenizer="its"))
        if any(line.startswith("model.") for line in problems(section)):
            continue  # one line, by the names of the run file
        ours = as_read(found)
        try:
            theirs = as_transformers(family, changed)
        except Exception:  # of any kind, and not in every version: no verdict, but null is as absent
            if key in changed and changed[key] is None:
                assert ours in (whole, reading(absent)), (key, ours)
            continue
        compared += 1
        assert ours == theirs, (key, changed.get(key))
    assert tried > 500 and refused > 100 and compared > 200, (tried, refused, compared)
