"""Transformer blocks, embeddings and heads.

Shape legend: B batch, S sequence, C hidden, H heads, K key/value heads, D = C / H, F ffn, V vocab.

A block is a list of separate steps (norm, QKV, attention, output projection, norm, feed-forward), because
AGoQ stores or recomputes each step's input separately. The residual stream, and so the
boundary tensor, stays float32 under autocast too. Between T tensor-parallel ranks, S below is S / T
outside of attention and the feed-forward, and H, K and F inside are the rank's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import pi, sqrt
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention.ops import differentiable, has_flash, repeat_shared
from kernels.attention.reach import EVERYTHING, Documents, Reach
from kernels.common import dispatch
from kernels.common import layers as reference
from kernels.common.matrices import empty_together, stacked
from kernels.fp8.products import CodedWeight
from kernels.layers import ops as layers
from node.config.schema import ModelSection
from node.model.lora import FrozenLinear
from node.model.products import AS_IT_IS, AddProduct, Way
from node.model.storage import Storage
from node.model.stored_layers import (
    AttentionParts,
    FfnParts,
    HeadLayout,
    Heads,
    Norm,
    Norms,
    attention_half,
    ffn_half,
)
from node.model.tensor_rank import TensorRank, compute_dtype, gather, row_parallel


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; with `offset`, times 1 + weight."""

    def __init__(self, hidden: int, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.eps = eps
        self.offset = offset

    def forward(self, x_bsc: Tensor) -> Tensor:
        return reference.norm(x_bsc, self.scale(), None, self.eps)

    def scale(self) -> Tensor:
        """What it multiplies by."""
        return 1.0 + self.weight if self.offset else self.weight


def norm(model: ModelSection) -> nn.Module:
    """The family's norm: RMSNorm or LayerNorm."""
    if model.family == "llama":
        return RMSNorm(model.hidden, model.norm_eps, offset=model.norm_offset)
    return nn.LayerNorm(model.hidden, eps=model.norm_eps)


def rotary_frequencies(model: ModelSection, *, windowed: bool = False) -> Tensor:
    """Radians a position of each pair of a head's elements, float32 [D / 2], with the model's scaling.

    `llama3` divides low frequencies by the factor, leaves high ones and interpolates between (Llama 3.1).
    They are computed on the CPU whatever the device, so that every stage has the same bits.

    Args:
        windowed: of blocks with a window, which may have a base of their own and then no scaling.
    """
    exponents = torch.arange(0, model.width, 2, dtype=torch.float32, device="cpu") / model.width
    if windowed and model.window_theta:
        return 1.0 / model.window_theta**exponents
    frequencies: Tensor = 1.0 / model.rope_theta**exponents
    if model.rope_scaling == "none":
        return frequencies
    scaled = frequencies / model.rope_factor
    if model.rope_scaling == "linear":
        return scaled
    wavelengths = 2 * pi / frequencies
    share = (model.rope_original / wavelengths - model.rope_low) / (model.rope_high - model.rope_low)
    between = (1 - share) * scaled + share * frequencies
    found = torch.where(wavelengths > model.rope_original / model.rope_low, scaled, between)
    return torch.where(wavelengths < model.rope_original / model.rope_high, frequencies, found)


class Rotary(nn.Module):
    """Rotary position embedding over whole heads, first half against second (the Llama convention).

    The tables depend on the config only and are not weights.
    """

    cos_sd: Tensor
    sin_sd: Tensor

    def __init__(self, sequence: int, frequencies: Tensor, device: torch.device) -> None:
        """`frequencies`: radians a position, as from `rotary_frequencies`."""
        super().__init__()
        angles = torch.outer(torch.arange(sequence, dtype=torch.float32, device="cpu"), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_sd", angles.cos().to(device), persistent=False)
        self.register_buffer("sin_sd", angles.sin().to(device), persistent=False)

    def forward(self, query_bhsd: Tensor, key_bksd: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            length = query_bhsd.shape[-2]
            tables = self.cos_sd[:length], self.sin_sd[:length]
            return reference.rotate(query_bhsd, *tables), reference.rotate(key_bksd, *tables)
        return layers.rotate_both(query_bhsd, key_bksd, self.cos_sd, self.sin_sd)

    def back(self, query_bhsd: Tensor, key_bksd: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the inputs: the inverse rotation."""
        return layers.rotate_both(query_bhsd, key_bksd, self.cos_sd, self.sin_sd, back=True)


def attention(query_bhsd: Tensor, key_bksd: Tensor, value_bksd: Tensor, reach: Reach = EVERYTHING) -> Tensor:
    """Causal attention; each key/value head serves H / K query heads. Returns [B, S, C]."""
    if reach.is_limited:
        return differentiable(query_bhsd, key_bksd, value_bksd, reach).transpose(1, 2).flatten(2)
    grouped = query_bhsd.shape[1] != key_bksd.shape[1]
    if grouped and not has_flash(query_bhsd):
        # Without FlashAttention torch makes and keeps S x S matrices for groups.
        key_bksd, value_bksd = repeat_shared(query_bhsd, key_bksd, value_bksd)
        grouped = False
    out_bhsd = F.scaled_dot_product_attention(
        query_bhsd, key_bksd, value_bksd, is_causal=True, enable_gqa=grouped
    )
    return out_bhsd.transpose(1, 2).flatten(2)


class Block(nn.Module, ABC):
    """Norm, attention, norm, feed-forward, each half added to the residual stream. [B, S, C] in and out.

    A family defines the projections and what lies between them.
    """

    fuses = True
    """False measures what autograd makes of a block with nothing packed."""
    attention_norm: nn.Module
    attention_output: nn.Linear
    attention_output_norm: nn.Module
    """With norms at both ends alone, as `ffn_output_norm`."""
    ffn_norm: nn.Module
    ffn_output_norm: nn.Module
    down: nn.Linear

    def __init__(self, model: ModelSection, storage: Storage, rank: TensorRank, window: int = 0) -> None:
        """`window`: as for `kernels.attention.reach.Reach`."""
        super().__init__()
        self.storage = storage
        self.rank = rank
        self.width = model.width
        self.window = window
        self.norm_place = model.norm_place
        self.is_plain = model.is_plain
        self.norm_eps = model.norm_eps
        self.has_gelu = model.activation == "gelu"
        """Of two inputs of the feed-forward, GELU gates in place of SiLU."""
        self.fixed_order = True
        """Sum attention's gradients in a fixed order."""
        self._ways: Sequence[Way] = (AS_IT_IS,) * 4
        """How each of `products` computes."""

    def products(self) -> tuple[tuple[nn.Linear, ...], ...]:
        """The block's projections; those with the same input together."""
        return self.attention_inputs(), (self.attention_output,), self.ffn_inputs(), (self.down,)

    def add_weight_gradients(self, adding_to: Callable[[Sequence[nn.Parameter]], AddProduct]) -> None:
        """Let products add weights' gradients to main gradients; `adding_to` gives what adds to these."""
        self._ways = [
            replace(way, add=adding_to([cast(nn.Parameter, one.weight) for one in together]))
            for way, together in zip(self._ways, self.products(), strict=True)
        ]

    def code_weight_gradients(self) -> None:
        """Multiply in FP8 for weights' gradients too."""
        self._ways = [replace(way, codes_gradients=True) for way in self._ways]

    @property
    def is_coded(self) -> bool:
        """Whether products are in FP8."""
        return self._ways[0].coded is not None

    @torch.no_grad()
    def code_weights(self) -> None:
        """Multiply in FP8 from now on, by codes of the weights as they are now; again after they change."""
        if not self.is_coded:
            self._ways = [
                replace(way, coded=CodedWeight.empty(*_size(together), together[0].weight.device))
                for way, together in zip(self._ways, self.products(), strict=True)
            ]
        for way, together in zip(self._ways, self.products(), strict=True):
            assert way.coded is not None
            # In place: captured passes read these addresses.
            way.coded.write(stacked([one.weight for one in together], together[0].weight.dtype))

    def codes(self) -> list[Tensor]:
        """The tensors that `code_weights` writes."""
        coded = [one for way in self._ways if way.coded for one in (way.coded.forward, way.coded.back)]
        return [part for one in coded for part in (one.codes, one.scales)]

    @torch.no_grad()
    def lay_weights_together(self) -> None:
        """Move weights that are multiplied as one under one another in memory."""
        for together in self.products():
            weights = [module.weight for module in together]
            for weight, part in zip(weights, empty_together(weights, weights[0].dtype), strict=True):
                weight.data = part.copy_(weight)

    @abstractmethod
    def attention_inputs(self) -> tuple[nn.Linear, ...]:
        """The projections into attention."""

    def head_norms(self) -> tuple[Tensor, ...]:
        """What normalised queries and keys are multiplied by; empty without such norms."""
        return ()

    def split(self, projected: Sequence[Tensor]) -> Heads:
        """Heads from the outputs of `attention_inputs`."""
        return self.split_by(projected, self.head_norms())

    @abstractmethod
    def split_by(self, projected: Sequence[Tensor], norms: Sequence[Tensor]) -> Heads:
        """`split` with these values of `head_norms`."""

    @abstractmethod
    def join(
        self, heads: Heads, projected: Sequence[Tensor], norms: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Gradients of the outputs of `attention_inputs` and of `head_norms`, from those of the heads.

        Args:
            projected: the outputs; counts with norms alone.
        """

    @abstractmethod
    def ffn_inputs(self) -> tuple[nn.Linear, ...]:
        """The projections into the feed-forward."""

    @abstractmethod
    def activation(self, *wide_bsf: Tensor) -> Tensor:
        """The input of `down` from the outputs of `ffn_inputs`: all [B, S, F]."""

    def qkv(self, normed_bsc: Tensor) -> Heads:
        """Queries [B, H, S, D], keys and values [B, K, S, D]."""
        return self.split([projection(normed_bsc) for projection in self.attention_inputs()])

    def forward(self, x_bsc: Tensor, documents: Documents | None = None) -> Tensor:
        """`documents`: attention does not cross them."""
        reach = Reach(window=self.window, documents=documents)
        packs = not self.storage.is_off or (self.is_plain and self._is_fused(x_bsc))
        if not self.is_coded and not (packs and torch.is_grad_enabled()):
            return self._plain(x_bsc, reach)
        ways = self._ways
        x_bsc = attention_half(
            x_bsc,
            AttentionParts(
                storage=self.storage,
                layout=HeadLayout(split=self.split_by, join=self.join),
                rank=self.rank,
                inputs=ways[0],
                output=ways[1],
                reach=reach,
                fixed_order=self.fixed_order,
            ),
            Norms(
                first=None if self.norm_place == "output" else Norm.of(self.attention_norm),
                last=self._last_norm(self.attention_norm, "attention_output_norm"),
                heads=self.head_norms(),
            ),
            self.attention_inputs(),
            self.attention_output,
        )
        return ffn_half(
            x_bsc,
            FfnParts(storage=self.storage, rank=self.rank, gelu=self.has_gelu, inputs=ways[2], down=ways[3]),
            Norms(
                first=None if self.norm_place == "output" else Norm.of(self.ffn_norm),
                last=self._last_norm(self.ffn_norm, "ffn_output_norm"),
            ),
            self.ffn_inputs(),
            self.down,
        )

    def _last_norm(self, only: nn.Module, name: str) -> Norm | None:
        """Of what a half adds: its only norm, or with norms at both ends the one with this name."""
        if self.norm_place == "input":
            return None
        return Norm.of(only if self.norm_place == "output" else getattr(self, name))

    def _is_fused(self, x_bsc: Tensor) -> bool:
        """Whether the fused halves run although nothing is packed: on GPUs in half precision."""
        half = compute_dtype(x_bsc) != torch.float32
        return self.fuses and half and dispatch.has_kernels(x_bsc.device.type)

    def _plain(self, x_bsc: Tensor, reach: Reach) -> Tensor:
        """Through plain autograd."""
        attend = partial(self._attend, reach=reach)
        if self.norm_place == "output":
            x_bsc = x_bsc + self.attention_norm(attend(x_bsc))
            output_bsc: Tensor = self.ffn_norm(self._feed_forward(x_bsc))
            return x_bsc + output_bsc
        if self.norm_place == "both":
            x_bsc = x_bsc + self.attention_output_norm(attend(self.attention_norm(x_bsc)))
            output_bsc = self.ffn_output_norm(self._feed_forward(self.ffn_norm(x_bsc)))
            return x_bsc + output_bsc
        x_bsc = x_bsc + attend(self.attention_norm(x_bsc))
        return x_bsc + self._feed_forward(self.ffn_norm(x_bsc))

    def _attend(self, x_bsc: Tensor, reach: Reach) -> Tensor:
        attended_bsc = attention(*self.qkv(gather(x_bsc, self.rank)), reach)
        return self._out_of(self.attention_output, attended_bsc)

    def _feed_forward(self, x_bsc: Tensor) -> Tensor:
        gathered_bsc = gather(x_bsc, self.rank)
        inner_bsf = self.activation(*(projection(gathered_bsc) for projection in self.ffn_inputs()))
        return self._out_of(self.down, inner_bsf)

    def _out_of(self, linear: nn.Linear | FrozenLinear, x: Tensor) -> Tensor:
        """A half's last projection of all ranks' inputs [B, S, inputs / T] to this rank's [B, S / T, C]."""
        if self.rank.count == 1:
            whole: Tensor = linear(x)
            return whole
        partial = linear.partial(x) if isinstance(linear, FrozenLinear) else F.linear(x, linear.weight)
        return row_parallel(partial, linear.bias, self.rank)


def _size(together: Sequence[nn.Linear]) -> tuple[int, int]:
    """Outputs and inputs of projections with one input."""
    return sum(one.out_features for one in together), together[0].in_features


class LlamaBlock(Block):
    """RMSNorm, rotary grouped-query attention, RMSNorm, SwiGLU.

    `ModelSection` adds biases of queries, keys and values, norms of queries and keys, norms of outputs, a
    window, another scale of the scores and a GELU gate.
    """

    query_norm: RMSNorm | None
    key_norm: RMSNorm | None

    def __init__(
        self, model: ModelSection, rotary: Rotary | None, storage: Storage, rank: TensorRank, window: int = 0
    ) -> None:
        """`rotary` is None for a block without position embedding."""
        super().__init__(model, storage, rank, window)
        q_width = model.q_width // rank.count
        kv_width = self.width * model.kv_heads // rank.count
        ffn = model.ffn // rank.count
        self.rotary = rotary
        self.attention_norm = norm(model)
        self.query = nn.Linear(model.hidden, q_width, bias=model.qkv_bias)
        self.key = nn.Linear(model.hidden, kv_width, bias=model.qkv_bias)
        self.value = nn.Linear(model.hidden, kv_width, bias=model.qkv_bias)
        self.norms_heads = model.qk_norm == "head"
        self.query_norm = self.key_norm = None
        if model.qk_norm != "none":
            widths = (model.width, model.width) if self.norms_heads else (q_width, kv_width)
            self.query_norm, self.key_norm = (
                RMSNorm(width, model.norm_eps, offset=model.norm_offset) for width in widths
            )
        self.query_factor = sqrt(model.width / model.query_scale) if model.query_scale else 1.0
        self.attention_output = nn.Linear(q_width, model.hidden, bias=False)
        if model.norm_place == "both":
            self.attention_output_norm, self.ffn_output_norm = norm(model), norm(model)
        self.ffn_norm = norm(model)
        self.gate = nn.Linear(model.hidden, ffn, bias=False)
        self.up = nn.Linear(model.hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, model.hidden, bias=False)

    def attention_inputs(self) -> tuple[nn.Linear, ...]:
        return self.query, self.key, self.value

    def head_norms(self) -> tuple[Tensor, ...]:
        return tuple(one.scale() for one in (self.query_norm, self.key_norm) if one is not None)

    def split_by(self, projected: Sequence[Tensor], norms: Sequence[Tensor]) -> Heads:
        heads = [self._to_be_normed(part) for part in projected]
        heads[: len(norms)] = [
            reference.norm(part, scale, None, self.norm_eps)
            for part, scale in zip(heads, norms, strict=False)
        ]
        query_bhsd, key_bksd, value_bksd = (
            torch.unflatten(part.flatten(2), -1, (-1, self.width)).transpose(1, 2) for part in heads
        )
        if self.query_factor != 1.0:
            query_bhsd = query_bhsd * self.query_factor
        if self.rotary is None:
            return query_bhsd, key_bksd, value_bksd
        query_bhsd, key_bksd = self.rotary(query_bhsd, key_bksd)
        return query_bhsd, key_bksd, value_bksd

    def _to_be_normed(self, projected_bsn: Tensor) -> Tensor:
        """What norms of queries and keys are taken over last: whole, or head by head [B, S, H, D]."""
        return torch.unflatten(projected_bsn, -1, (-1, self.width)) if self.norms_heads else projected_bsn

    def join(
        self, heads: Heads, projected: Sequence[Tensor], norms: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        query_bhsd, key_bksd, value_bksd = heads
        if self.rotary is not None:
            query_bhsd, key_bksd = self.rotary.back(query_bhsd, key_bksd)
        if self.query_factor != 1.0:
            query_bhsd = query_bhsd * self.query_factor
        grads = [part.transpose(1, 2).flatten(2) for part in (query_bhsd, key_bksd, value_bksd)]
        of_norms = []
        for number, scale in enumerate(norms):
            grad, x = self._to_be_normed(grads[number]), self._to_be_normed(projected[number])
            of_x, of_scale, _ = reference.norm_gradient(grad, x, scale, None, self.norm_eps)
            grads[number] = of_x.to(grad.dtype).flatten(2)
            of_norms.append(of_scale.to(scale.dtype))
        return tuple(grads), tuple(of_norms)

    def ffn_inputs(self) -> tuple[nn.Linear, ...]:
        return self.gate, self.up

    def activation(self, *wide_bsf: Tensor) -> Tensor:
        gate_bsf, up_bsf = wide_bsf
        return reference.gated(gate_bsf, up_bsf, self.has_gelu)


class Gpt2Block(Block):
    """LayerNorm, multi-head attention (K = H), LayerNorm, tanh GELU; biases throughout."""

    def __init__(self, model: ModelSection, storage: Storage, rank: TensorRank) -> None:
        super().__init__(model, storage, rank)
        q_width, ffn = model.hidden // rank.count, model.ffn // rank.count
        self.attention_norm = norm(model)
        self.qkv_projection = nn.Linear(model.hidden, 3 * q_width)
        self.attention_output = nn.Linear(q_width, model.hidden)
        self.ffn_norm = norm(model)
        self.up = nn.Linear(model.hidden, ffn)
        self.down = nn.Linear(ffn, model.hidden)

    def attention_inputs(self) -> tuple[nn.Linear, ...]:
        return (self.qkv_projection,)

    def split_by(self, projected: Sequence[Tensor], norms: Sequence[Tensor]) -> Heads:
        (joined,) = projected
        heads_bsnhd = torch.unflatten(joined, -1, (3, -1, self.width))
        query_bhsd, key_bhsd, value_bhsd = heads_bsnhd.permute(2, 0, 3, 1, 4).unbind(0)
        return query_bhsd, key_bhsd, value_bhsd

    def join(
        self, heads: Heads, projected: Sequence[Tensor], norms: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (torch.stack([part.transpose(1, 2) for part in heads], dim=2).flatten(2),), ()

    def ffn_inputs(self) -> tuple[nn.Linear, ...]:
        return (self.up,)

    def activation(self, *wide_bsf: Tensor) -> Tensor:
        (up_bsf,) = wide_bsf
        return F.gelu(up_bsf, approximate="tanh")


def _embedding(rows: int, width: int) -> nn.Embedding:
    """Without initial weights: to draw them on the meta device torch imports its compiler, for seconds."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Embedding(nn.Module):
    """Token ids [B, S] int64 to hidden [B, S, C]; GPT-2 adds learned positions, which begin again with each
    of `documents`."""

    def __init__(self, model: ModelSection, rank: TensorRank) -> None:
        super().__init__()
        self.rank = rank
        self.tokens = _embedding(model.vocab, model.hidden)
        self.positions = _embedding(model.sequence, model.hidden) if model.family == "gpt2" else None
        self.scale = sqrt(model.hidden) if model.scaled_embedding else 1.0

    def forward(self, tokens_bs: Tensor, documents: Documents | None = None) -> Tensor:
        x_bsc: Tensor = self.tokens(tokens_bs).float()
        if self.scale != 1.0:
            x_bsc = x_bsc * self.scale
        if self.positions is None:
            return x_bsc
        length = tokens_bs.shape[1]
        first = self.rank.index * length
        if documents is not None:
            own = torch.arange(first, first + length, device=tokens_bs.device)
            within: Tensor = self.positions(own - documents.first_bs[:, first : first + length])
            return x_bsc + within.float()
        return x_bsc + self.positions.weight[first : first + length].float()


class Head(nn.Module):
    """Final norm and output projection: hidden [B, S, C] to logits [B, S, V]."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.norm = norm(model)
        self.output = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x_bsc: Tensor) -> Tensor:
        logits_bsv: Tensor = self.output(self.norm(x_bsc))
        return logits_bsv
