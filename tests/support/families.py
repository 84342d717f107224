"""Tiny random models of every family, made by transformers, and our `[model]` for what it saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from node.config.schema import ModelSection
from node.state.start import open_source

LENGTH = 1100
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "beta_fast": 20.0,
    "original_max_position_embeddings": 256,
}
ROUTED = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 50}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 4.0},
            },
        },
    ),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "norm_topk_prob": True, "moe_intermediate_size": 24} | ROUTED),
    "mixtral": ("Mixtral", {"sliding_window": 50} | ROUTED),
    "olmoe": ("Olmoe", ROUTED),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 40,
            "swiglu_limit": 0.7,
            "rope_parameters": {**YARN, "truncate": False},
            **ROUTED,
        },
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 2048, "tie_word_embeddings": True},
    ),
}


def make(family: str) -> Any:
    """A random model of a family, in evaluation mode and float32."""
    import transformers  # takes seconds, which only some workers spend

    name, extra = CONFIGS[family]
    torch.manual_seed(7)
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**{**SIZES, **extra})
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "bias" in name:  # norms and biases, so that none is trivial
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def section(folder: Path, sequence: int = LENGTH) -> ModelSection:
    source = open_source(str(folder), {"sequence": sequence})
    return replace(ModelSection(), from_=source.name, **source.model)
