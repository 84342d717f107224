"""Hugging Face's models of a run's shape, and their names of our parameters. Imports no torch by itself."""

from typing import Any

from node.config.schema import ModelSection
from node.model.units import EMBED, HEAD, is_block

_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "qkv_projection": "attn.c_attn",
    "attention_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_LLAMA_ENDS = {
    (EMBED, "tokens"): "model.embed_tokens",
    (HEAD, "norm"): "model.norm",
    (HEAD, "output"): "lm_head",
}
_GPT2_ENDS = {
    (EMBED, "tokens"): "transformer.wte",
    (EMBED, "positions"): "transformer.wpe",
    (HEAD, "norm"): "transformer.ln_f",
    (HEAD, "output"): "lm_head",
}


def hf_name(model: ModelSection, unit: str, parameter: str) -> str:
    """The parameter's key in transformers' state dict.

    A tied head has a key of its own there too; transformers keeps it equal to the embedding's.
    """
    module, kind = parameter.rsplit(".", 1)
    llama = model.family == "llama"
    if is_block(unit):
        index = int(unit.removeprefix("block."))
        prefix = f"model.layers.{index}" if llama else f"transformer.h.{index}"
        return f"{prefix}.{(_LLAMA_BLOCK if llama else _GPT2_BLOCK)[module]}.{kind}"
    return f"{(_LLAMA_ENDS if llama else _GPT2_ENDS)[unit, module]}.{kind}"


def hf_transposed(model: ModelSection, unit: str, parameter: str) -> bool:
    """Whether transformers stores the matrix as [inputs, outputs]: GPT-2's Conv1D layers do."""
    module, kind = parameter.rsplit(".", 1)
    return model.family == "gpt2" and is_block(unit) and kind == "weight" and not module.endswith("norm")


def hf_model(model: ModelSection) -> Any:
    """LlamaForCausalLM or GPT2LMHeadModel of this shape with random weights, dropout off."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if model.family == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=model.vocab,
                hidden_size=model.hidden,
                intermediate_size=model.ffn,
                num_hidden_layers=model.layers,
                num_attention_heads=model.heads,
                num_key_value_heads=model.kv_heads,
                max_position_embeddings=model.sequence,
                rms_norm_eps=model.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
                tie_word_embeddings=model.tied,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=model.vocab,
            n_positions=model.sequence,
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=model.ffn,
            layer_norm_epsilon=model.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=model.tied,
        )
    )
