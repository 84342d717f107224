"""Where each parameter is found in Hugging Face's LlamaForCausalLM and GPT2LMHeadModel. Torch-free."""

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
