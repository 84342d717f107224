"""Mixtures of experts with Llama's attention: Qwen3-MoE, Mixtral, OLMoE and gpt-oss.

A router gives each token a logit for every expert of a block. The experts with the largest logits compute the
token, and their results are summed with the router's weights (Shazeer et al. 2017, arXiv 1701.06538). For
each projection, the matrices of all experts of a block are stacked in one parameter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from node.config.schema import MOST_EXPERTS, MOST_LAYERS, ModelSection
from node.model.families.config_json import ConfigReader
from node.model.families.family import Cut, FileTensor, Initial, ParameterSpec
from node.model.families.llama import FULL, SLIDING, Llama, positions, rope_of, windows, with_positions
from wire.errors import ConfigError

ROUTER, SINKS = "router", "sinks"
GPT_OSS = "gpt_oss"
SWIGLU_ALPHA = 1.702
"""The factor inside the gate's sigmoid if inputs are clamped."""
_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_IN_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_FUSED = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", 0)}
"""For each projection of gpt-oss's experts: its tensor, and its index among the interleaved outputs."""
_FEATURES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"qk_norm": "head", "window": False},
    "mixtral": {"qk_norm": "none", "normalized_routing": True},
    "olmoe": {"qk_norm": "full", "window": False},
    GPT_OSS: {
        "qk_norm": "none",
        "qkv_bias": True,
        "all_biases": True,
        "sinks": True,
        "swiglu_limit": True,
        "normalized_routing": True,
    },
}
"""The features of each `model_type`. A feature that is not listed may have any value, except that those in
`_OWN` must be off."""
_OWN = ("qkv_bias", "all_biases", "sinks", "swiglu_limit")


class Mixture(Llama):
    """Llama's blocks with a mixture of experts instead of the feed-forward."""

    name = "mixture"
    options = (
        *("head_width", "rope_theta", "rope_scaling", "rope_factor", "rope_low", "rope_high"),
        *("rope_original", "rope_beta_fast", "rope_beta_slow", "rope_truncate", "rope_attention"),
        *("qkv_bias", "qk_norm", "window", "no_window", "experts", "experts_per_token"),
        *("normalized_routing", "balance_loss", "z_loss", "swiglu_limit", "sinks", "all_biases"),
    )
    choices: ClassVar = {key: Llama.choices[key] for key in ("rope_scaling", "qk_norm")}
    model_types: ClassVar = {
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        GPT_OSS: "GptOssForCausalLM",
    }
    tied_types = ()
    tokenizers: ClassVar = {"qwen3_moe": "Qwen2Tokenizer", "olmoe": "GPTNeoXTokenizer"}

    def block(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        (first, *attention), bias = self.attention(model), model.all_biases
        router = ParameterSpec(
            f"{ROUTER}.weight", (model.experts, model.hidden), Initial.NORMAL, precise=True
        )
        sinks = ParameterSpec(f"{SINKS}.weight", (model.heads,), Initial.ZEROS, Cut.OUTPUTS)
        return (
            first,
            *attention,
            *((sinks,) if model.sinks else ()),
            *self.norm("ffn_norm", model),
            router,
            *((ParameterSpec(f"{ROUTER}.bias", (model.experts,), Initial.ZEROS),) if bias else ()),
            *self.into("gate", model.ffn, model, bias=bias, experts=model.experts),
            *self.into("up", model.ffn, model, bias=bias, experts=model.experts),
            *self.out_of("down", model.ffn, model, bias=bias, experts=model.experts),
        )

    @property
    def product_layers(self) -> tuple[tuple[str, ...], ...]:
        return self.attention_inputs, (self.attention_output,)

    def problems(self, model: ModelSection) -> Iterator[str]:
        yield from super().problems(model)
        if model.experts < 1:
            yield f"model.experts must be at least 1 in a mixture, got {model.experts}"
        elif not 1 <= model.experts_per_token <= model.experts:
            yield (
                f"model.experts_per_token must be from 1 to model.experts ({model.experts}), "
                f"got {model.experts_per_token}"
            )
        for key in ("balance_loss", "z_loss", "swiglu_limit"):
            if not 0 <= getattr(model, key) < float("inf"):
                yield f"model.{key} must be a finite number of at least 0, got {getattr(model, key)}"

    # ---- adapters

    def parameters_in_peft(self, model: ModelSection) -> tuple[str, ...]:
        # For the other families, PEFT converts adapters of single experts and of a router that is a module.
        return (ROUTER, *_FUSED) if self.model_type(model) == GPT_OSS else ()

    def adapter_problems(
        self, model: ModelSection, targets: tuple[str, ...], dropout: float
    ) -> Iterator[str]:
        if ("gate" in targets) != ("up" in targets):
            yield "lora.targets must name both gate and up of experts or neither: PEFT has them as one"
        if dropout and {ROUTER, *self.ffn_inputs, self.ffn_output} & set(targets):
            yield (
                "lora.dropout must be 0 with adapters on router or experts, where PEFT has none: set it "
                "to 0, or lora.targets to projections of attention"
            )

    # ---- checkpoints

    def paths(self, model: ModelSection) -> Mapping[str, str]:
        kind, paths = self.model_type(model), dict(super().paths(model))
        within = "block_sparse_moe" if kind == "mixtral" else "mlp"
        names = _IN_MIXTRAL if kind == "mixtral" else _EXPERTS
        block = f"model.layers.{{}}.{within}"
        return {
            **paths,
            ROUTER: f"{block}.{ROUTER if kind == GPT_OSS else 'gate'}",
            **{layer: f"{block}.experts.{{}}.{name}" for layer, name in names.items()},
        }

    def file_tensors(
        self, model: ModelSection, spec: ParameterSpec, number: int | None
    ) -> tuple[FileTensor, ...]:
        if spec.layer == SINKS:
            return (FileTensor(f"model.layers.{number}.self_attn.sinks", spec.shape),)
        if not spec.experts or self.model_type(model) != GPT_OSS:
            return super().file_tensors(model, spec, number)
        name, turn = _FUSED[spec.layer]
        turns = len([True for fused, _ in _FUSED.values() if fused == name])
        each = spec.shape[0] // spec.experts * turns
        is_matrix = len(spec.shape) == 2
        shape = (spec.experts, spec.shape[1], each) if is_matrix else (spec.experts, each)
        path = f"model.layers.{number}.mlp.experts.{name}{'' if is_matrix else '_bias'}"
        return (FileTensor(path, shape, transposed=is_matrix, turn=turn, turns=turns),)

    def model_type(self, model: ModelSection) -> str:
        own: dict[str, Any] = {
            "qk_norm": model.qk_norm,
            "window": model.window > 0,
            "normalized_routing": model.normalized_routing,
            **{key: bool(getattr(model, key)) for key in _OWN},
        }
        for kind, features in _FEATURES.items():
            if all(own[key] == features.get(key, key not in _OWN and own[key]) for key in own):
                return kind
        named = ", ".join(f"{key} {getattr(model, key)}" for key in own)
        raise ConfigError(f"no Hugging Face mixture has all of model.{named}: no export is possible")

    def read_config(self, reader: ConfigReader, kind: str) -> dict[str, Any]:
        if kind == GPT_OSS:
            return _gpt_oss(reader)
        reader.must_be("router_jitter_noise", 0.0, 0)
        if kind == "olmoe" and reader.get("clip_qkv") is not None:
            raise reader.refused("clip_qkv", "null")
        if kind == "qwen3_moe":
            reader.must_be("decoder_sparse_step", 1)
            reader.must_be("mlp_only_layers", [])
            reader.must_be("use_sliding_window", False)
            width = reader.whole("moe_intermediate_size", 768)
        else:
            width = reader.whole("intermediate_size", {"mixtral": 14336}.get(kind, 2048))
        shape = super().read_config(
            replace(reader, config={**reader.config, "intermediate_size": width}), kind
        )
        experts, chosen = {"qwen3_moe": (128, 8), "mixtral": (8, 2), "olmoe": (64, 8)}[kind]
        return {
            **shape,
            "qk_norm": _FEATURES[kind]["qk_norm"],
            **_experts(reader, experts, chosen),
            "normalized_routing": kind == "mixtral" or reader.flag("norm_topk_prob", False),
        }

    def write_config(
        self, model: ModelSection, kind: str, common: Mapping[str, Any], rest: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        written = super().write_config(model, kind, common, rest)
        count = "num_experts" if kind in ("qwen3_moe", "olmoe") else "num_local_experts"
        written |= {count: model.experts, "num_experts_per_tok": model.experts_per_token}
        if kind in ("qwen3_moe", "olmoe"):
            written["norm_topk_prob"] = model.normalized_routing
        if kind == "qwen3_moe":
            # The width of blocks without experts. The model has none.
            dense = (rest or {}).get("intermediate_size", model.ffn)
            written |= {"moe_intermediate_size": model.ffn, "intermediate_size": dense}
            written |= {} if rest is not None else {"decoder_sparse_step": 1, "mlp_only_layers": []}
        if kind == GPT_OSS:
            slides = [
                SLIDING if model.window and index not in model.no_window else FULL
                for index in range(model.layers)
            ]
            written |= {"attention_bias": True, "layer_types": slides, "swiglu_limit": model.swiglu_limit}
        if model.balance_loss:
            written["router_aux_loss_coef"] = model.balance_loss
        return written


def _experts(reader: ConfigReader, count: int, chosen: int) -> dict[str, int]:
    """The number of experts, and how many of them compute a token. The arguments are the defaults."""
    key = "num_local_experts" if "num_local_experts" in reader.config else "num_experts"
    experts = reader.whole(key, count, MOST_EXPERTS)
    chosen = reader.whole("num_experts_per_tok", chosen, MOST_EXPERTS)
    return {"experts": experts, "experts_per_token": chosen}


def _gpt_oss(reader: ConfigReader) -> dict[str, Any]:
    reader.must_be("hidden_act", "silu")
    reader.must_be("attention_bias", True)
    reader.must_be("swiglu_alpha", SWIGLU_ALPHA)
    reader.must_be("partial_rotary_factor", 1.0)
    layers = reader.whole("num_hidden_layers", 36, MOST_LAYERS)
    hidden, heads = reader.whole("hidden_size", 2880), reader.whole("num_attention_heads", 64)
    width = reader.whole("head_dim", 64)
    given = reader.object("rope_scaling")
    given = given if given.config else reader.object("rope_parameters")
    if not reader.get("rope_scaling") and reader.get("rope_parameters") is None:
        given = ConfigReader(
            {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            reader.where,
        )
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": reader.whole("num_key_value_heads", 8),
        "head_width": 0 if width * heads == hidden else width,
        "ffn": reader.whole("intermediate_size", 2880),
        "norm_eps": reader.number("rms_norm_eps", 1e-5),
        "qkv_bias": True,
        "all_biases": True,
        "sinks": True,
        "swiglu_limit": reader.number("swiglu_limit", 7.0),
        **windows(reader, GPT_OSS, layers),
        **rope_of(with_positions(given, reader), reader.number("rope_theta", 150_000.0), positions(reader)),
        **_experts(reader, 128, 4),
    }
