"""The transformer blocks, embeddings and heads of both families.

Shape legend: B batch, S sequence, C hidden, H heads, K key/value heads, D = C / H, F ffn, V vocab.

A block is a list of separate steps (norm, QKV, attention, output projection, norm, feed-forward), because
AGoQ stores or recomputes each step's input on its own terms (design section 4). The residual stream, and so
what crosses a boundary, stays float32 under autocast too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.config.schema import ModelSection


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.eps = eps

    def forward(self, x_bsc: Tensor) -> Tensor:
        return F.rms_norm(x_bsc, self.weight.shape, self.weight, self.eps)


def norm(model: ModelSection) -> nn.Module:
    """The family's norm: RMSNorm or LayerNorm."""
    if model.family == "llama":
        return RMSNorm(model.hidden, model.norm_eps)
    return nn.LayerNorm(model.hidden, eps=model.norm_eps)


class Rotary(nn.Module):
    """Rotary position embedding over whole heads, first half against second (the Llama convention).

    The tables are a function of `rope_theta` and are no part of the weights.
    """

    cos_sd: Tensor
    sin_sd: Tensor

    def __init__(self, sequence: int, width: int, theta: float, device: torch.device) -> None:
        super().__init__()
        # Computed on the CPU whatever the device, so that every stage has the same bits.
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
        frequencies = 1.0 / theta**exponents
        angles = torch.outer(torch.arange(sequence, dtype=torch.float32, device="cpu"), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_sd", angles.cos().to(device), persistent=False)
        self.register_buffer("sin_sd", angles.sin().to(device), persistent=False)

    def forward(self, x_bhsd: Tensor) -> Tensor:
        length = x_bhsd.shape[-2]
        first, second = x_bhsd.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        rotated = x_bhsd * self.cos_sd[:length] + turned * self.sin_sd[:length]
        return rotated.to(x_bhsd.dtype)


def attention(query_bhsd: Tensor, key_bksd: Tensor, value_bksd: Tensor) -> Tensor:
    """Causal attention; each key/value head serves H / K query heads. Returns [B, S, C]."""
    out_bhsd = F.scaled_dot_product_attention(
        query_bhsd,
        key_bksd,
        value_bksd,
        is_causal=True,
        enable_gqa=query_bhsd.shape[1] != key_bksd.shape[1],
    )
    return out_bhsd.transpose(1, 2).flatten(2)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary grouped-query attention, RMSNorm, SwiGLU; no biases. [B, S, C] in and out."""

    def __init__(self, model: ModelSection, rotary: Rotary) -> None:
        super().__init__()
        self.width = model.hidden // model.heads
        kv_width = self.width * model.kv_heads
        self.rotary = rotary
        self.attention_norm = norm(model)
        self.query = nn.Linear(model.hidden, model.hidden, bias=False)
        self.key = nn.Linear(model.hidden, kv_width, bias=False)
        self.value = nn.Linear(model.hidden, kv_width, bias=False)
        self.attention_output = nn.Linear(model.hidden, model.hidden, bias=False)
        self.ffn_norm = norm(model)
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def qkv(self, normed_bsc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, H, S, D] and keys [B, K, S, D], and values [B, K, S, D]."""
        heads = (-1, self.width)
        query_bhsd = self.query(normed_bsc).unflatten(-1, heads).transpose(1, 2)
        key_bksd = self.key(normed_bsc).unflatten(-1, heads).transpose(1, 2)
        value_bksd = self.value(normed_bsc).unflatten(-1, heads).transpose(1, 2)
        return self.rotary(query_bhsd), self.rotary(key_bksd), value_bksd

    def ffn(self, normed_bsc: Tensor) -> Tensor:
        inner_bsf = F.silu(self.gate(normed_bsc)) * self.up(normed_bsc)
        out_bsc: Tensor = self.down(inner_bsf)
        return out_bsc

    def forward(self, x_bsc: Tensor) -> Tensor:
        attended_bsc = attention(*self.qkv(self.attention_norm(x_bsc)))
        x_bsc = x_bsc + self.attention_output(attended_bsc)
        return x_bsc + self.ffn(self.ffn_norm(x_bsc))


class Gpt2Block(nn.Module):
    """LayerNorm, multi-head attention, LayerNorm, tanh GELU; biases throughout. [B, S, C] in and out."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.width = model.hidden // model.heads
        self.attention_norm = norm(model)
        self.qkv_projection = nn.Linear(model.hidden, 3 * model.hidden)
        self.attention_output = nn.Linear(model.hidden, model.hidden)
        self.ffn_norm = norm(model)
        self.up = nn.Linear(model.hidden, model.ffn)
        self.down = nn.Linear(model.ffn, model.hidden)

    def qkv(self, normed_bsc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, H, S, D]."""
        heads_bsnhd = self.qkv_projection(normed_bsc).unflatten(-1, (3, -1, self.width))
        query_bhsd, key_bhsd, value_bhsd = heads_bsnhd.permute(2, 0, 3, 1, 4).unbind(0)
        return query_bhsd, key_bhsd, value_bhsd

    def ffn(self, normed_bsc: Tensor) -> Tensor:
        inner_bsf = F.gelu(self.up(normed_bsc), approximate="tanh")
        out_bsc: Tensor = self.down(inner_bsf)
        return out_bsc

    def forward(self, x_bsc: Tensor) -> Tensor:
        attended_bsc = attention(*self.qkv(self.attention_norm(x_bsc)))
        x_bsc = x_bsc + self.attention_output(attended_bsc)
        return x_bsc + self.ffn(self.ffn_norm(x_bsc))


class Embedding(nn.Module):
    """Token ids [B, S] int64 to hidden [B, S, C]; GPT-2 adds learned positions."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        self.positions = nn.Embedding(model.sequence, model.hidden) if model.family == "gpt2" else None

    def forward(self, tokens_bs: Tensor) -> Tensor:
        x_bsc: Tensor = self.tokens(tokens_bs)
        if self.positions is None:
            return x_bsc
        return x_bsc + self.positions.weight[: tokens_bs.shape[1]]


class Head(nn.Module):
    """Final norm and output projection: hidden [B, S, C] to logits [B, S, V]."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.norm = norm(model)
        self.output = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x_bsc: Tensor) -> Tensor:
        logits_bsv: Tensor = self.output(self.norm(x_bsc))
        return logits_bsv
