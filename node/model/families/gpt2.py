"""GPT-2: LayerNorm, learned positions, joined queries, keys and values, tanh GELU, biases throughout."""

from collections.abc import Mapping
from typing import Any, ClassVar

from node.config.schema import MOST_LAYERS, ModelSection
from node.model.families.config_json import ConfigReader
from node.model.families.family import Family, ParameterSpec

_OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
"""Keys that transformers accepts as synonyms."""
_BLOCK = {
    "attention_norm": "ln_1",
    "qkv_projection": "attn.c_attn",
    "attention_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_PATHS = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    **{layer: f"transformer.h.{{}}.{path}" for layer, path in _BLOCK.items()},
    "norm": "transformer.ln_f",
    "output": "lm_head",
}


class Gpt2(Family):
    """GPT-2. It ignores `kv_heads`."""

    name = "gpt2"
    attention_inputs = ("qkv_projection",)
    ffn_inputs = ("up",)
    norm_has_bias = True
    rotates = False
    model_types: ClassVar = {"gpt2": "GPT2LMHeadModel"}
    tokenizers: ClassVar = {"gpt2": "GPT2Tokenizer"}
    tied_types = ("gpt2",)
    positions_key = "n_positions"
    transposes = True

    def block(self, model: ModelSection) -> tuple[ParameterSpec, ...]:
        return (
            *self.norm("attention_norm", model),
            *self.into("qkv_projection", 3 * model.hidden, model, bias=True, joined=3),
            *self.out_of("attention_output", model.hidden, model, bias=True),
            *self.norm("ffn_norm", model),
            *self.into("up", model.ffn, model, bias=True),
            *self.out_of("down", model.ffn, model, bias=True),
        )

    def paths(self, model: ModelSection) -> Mapping[str, str]:
        return _PATHS

    def model_type(self, model: ModelSection) -> str:
        return "gpt2"

    def read_config(self, reader: ConfigReader, kind: str) -> dict[str, Any]:
        reader.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
        reader.must_be("scale_attn_weights", True)
        reader.must_be("scale_attn_by_inverse_layer_idx", False)
        reader.must_be("add_cross_attention", False)
        for key, other in _OTHER_NAMES.items():
            reader.must_be(other, reader.get(key))
        hidden, heads = reader.whole("n_embd"), reader.whole("n_head")
        return {
            "layers": reader.whole("n_layer", most=MOST_LAYERS),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads,
            "ffn": reader.whole("n_inner", 4 * hidden),
            "norm_eps": reader.number("layer_norm_epsilon", 1e-5),
        }

    def write_config(
        self, model: ModelSection, kind: str, common: Mapping[str, Any], rest: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        sizes = {
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.ffn,
            "n_positions": model.sequence,
            # The same value: llama.cpp's converter reads this key, though transformers no longer writes it.
            "n_ctx": model.sequence,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
        }
        # A synonym would count more than the key itself.
        kept = {key: value for key, value in (rest or {}).items() if key not in _OTHER_NAMES.values()}
        return {"bos_token_id": None, "eos_token_id": None, **kept, **common, **sizes}
