"""Transformer blocks, embeddings and heads.

Shape legend: B batch, S sequence, C hidden, H heads, K key/value heads, D = C / H, F ffn, V vocab. With T
tensor-parallel ranks, S is S / T outside attention and the feed-forward. Inside them, H, K and F count the
rank's own heads and columns.

A block is a list of separate steps (norm, QKV, attention, output projection, norm, feed-forward), because
AGoQ stores or recomputes the input of each step separately. The residual stream stays float32 under autocast,
and so do the boundary tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention.ops import differentiable, has_flash, repeat_shared
from kernels.attention.reach import EVERYTHING, Documents, Reach
from kernels.common import dispatch
from kernels.common import layers as reference
from kernels.common.matrices import empty_together, stacked
from kernels.fp8.products import CodedWeight
from node.config.schema import ModelSection
from node.model.families.family import Family, ParameterSpec
from node.model.families.known import GPT2, family_of
from node.model.lora import FrozenLinear
from node.model.past import BlockSlice, Slice, slice_attention
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
    """x / rms(x) * weight over the last dimension. With `offset` the factor is 1 + weight."""

    def __init__(self, hidden: int, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.eps = eps
        self.offset = offset

    def forward(self, x_bsc: Tensor) -> Tensor:
        return reference.norm(x_bsc, self.scale(), None, self.eps)

    def scale(self) -> Tensor:
        """The factors of the normalized elements, [hidden]."""
        return 1.0 + self.weight if self.offset else self.weight


def norm(model: ModelSection, width: int) -> nn.Module:
    """The family's norm over `width` elements: RMSNorm or LayerNorm."""
    if family_of(model).norm_has_bias:
        return nn.LayerNorm(width, eps=model.norm_eps)
    return RMSNorm(width, model.norm_eps, offset=model.norm_offset)


def attention(
    query_bhsd: Tensor,
    key_bksd: Tensor,
    value_bksd: Tensor,
    reach: Reach = EVERYTHING,
    at: BlockSlice | None = None,
) -> Tensor:
    """Causal attention with grouped heads: each key/value head serves H / K query heads.

    Args:
        reach: which keys a query sees.
        at: the slice that the S tokens are. Its queries also see the keys of earlier slices.

    Returns:
        [B, S, C].
    """
    if at is not None:
        return slice_attention(query_bhsd, key_bksd, value_bksd, at, reach).transpose(1, 2).flatten(2)
    if reach.is_limited:
        return differentiable(query_bhsd, key_bksd, value_bksd, reach).transpose(1, 2).flatten(2)
    grouped = query_bhsd.shape[1] != key_bksd.shape[1]
    if grouped and not has_flash(query_bhsd):
        # Without FlashAttention torch allocates and keeps S x S matrices for grouped heads.
        key_bksd, value_bksd = repeat_shared(query_bhsd, key_bksd, value_bksd)
        grouped = False
    out_bhsd = F.scaled_dot_product_attention(
        query_bhsd, key_bksd, value_bksd, is_causal=True, enable_gqa=grouped
    )
    return out_bhsd.transpose(1, 2).flatten(2)


class Block(nn.Module, ABC):
    """Norm, attention, norm, feed-forward; each half is added to the residual stream [B, S, C].

    The family declares the projections and norms. A subclass defines the operations between them.
    """

    family: ClassVar[Family]

    fuses = True
    """On a GPU in half precision, run the halves as autograd functions although nothing is packed. False runs
    plain autograd."""
    always_packs = False
    """Run the halves as autograd functions everywhere, also where nothing is packed."""
    attention_norm: nn.Module
    attention_output_norm: nn.Module
    """Present only if `norm_place` is "both", like `ffn_output_norm`."""
    ffn_norm: nn.Module
    ffn_output_norm: nn.Module

    def __init__(
        self, model: ModelSection, index: int, tables: object, storage: Storage, rank: TensorRank
    ) -> None:
        """
        Args:
            index: the block's number, counted from 0.
            tables: the result of `tables`.
        """
        super().__init__()
        self.storage = storage
        self.rank = rank
        self.width = model.width
        self.window = model.window_of(index)
        self.norm_place = model.norm_place
        self.is_plain = model.is_plain
        self.norm_eps = model.norm_eps
        self.has_gelu = model.activation == "gelu"
        """Whether a feed-forward with two inputs is gated by GELU instead of SiLU."""
        self.fixed_order = True
        """Sum attention's gradients in a fixed order, so that their bits repeat."""
        specs = self.family.block(model)
        biased = {spec.layer for spec in specs if spec.name.endswith(".bias")}
        for spec in specs:
            if spec.name.endswith(".weight"):
                self.add_module(spec.layer, self._layer(model, spec, bias=spec.layer in biased))
        self._ways: Sequence[Way] = (AS_IT_IS,) * len(self.family.product_layers)
        """How to compute each of `products`."""

    def _layer(self, model: ModelSection, spec: ParameterSpec, *, bias: bool) -> nn.Module:
        """The module that holds a weight and its bias."""
        shape = spec.shard_shape(self.rank.count)
        return norm(model, *shape) if len(shape) == 1 else nn.Linear(shape[1], shape[0], bias=bias)

    @classmethod
    def tables(cls, model: ModelSection, device: torch.device) -> object:
        """What the blocks of a chunk share besides weights, such as tables of positions."""
        return None

    def products(self) -> tuple[tuple[nn.Linear, ...], ...]:
        """The block's projections. Those with the same input are in one tuple."""
        return tuple(map(self._projections, self.family.product_layers))

    def _projections(self, layers: Sequence[str]) -> tuple[nn.Linear, ...]:
        return tuple(cast(nn.Linear, getattr(self, layer)) for layer in layers)

    def add_weight_gradients(self, adding_to: Callable[[Sequence[nn.Parameter]], AddProduct]) -> None:
        """Let the products add weights' gradients to the main gradients.

        Args:
            adding_to: returns the function that adds to the main gradients of the given weights.
        """
        self._ways = [
            replace(way, add=adding_to([cast(nn.Parameter, linear.weight) for linear in together]))
            for way, together in zip(self._ways, self.products(), strict=True)
        ]

    def code_weight_gradients(self) -> None:
        """Compute the products for weights' gradients in FP8 too."""
        self._ways = [replace(way, codes_gradients=True) for way in self._ways]

    @property
    def is_coded(self) -> bool:
        return self._ways[0].coded is not None

    @torch.no_grad()
    def code_weights(self) -> None:
        """Compute in FP8 from now on, with codes of the current weights. Call it again after the weights
        change."""
        if not self.is_coded:
            self._ways = [
                replace(way, coded=CodedWeight.empty(*_size(together), together[0].weight.device))
                for way, together in zip(self._ways, self.products(), strict=True)
            ]
        for way, together in zip(self._ways, self.products(), strict=True):
            assert way.coded is not None
            # Written in place, because captured passes read these addresses.
            way.coded.write(stacked([linear.weight for linear in together], together[0].weight.dtype))

    def codes(self) -> list[Tensor]:
        """The tensors that `code_weights` writes: the codes and scales of each matrix."""
        coded = [matrix for way in self._ways if way.coded for matrix in (way.coded.forward, way.coded.back)]
        return [part for matrix in coded for part in (matrix.codes, matrix.scales)]

    @torch.no_grad()
    def lay_weights_together(self) -> None:
        """Make the weights that are multiplied as one matrix contiguous in memory."""
        for together in self.products():
            weights = [module.weight for module in together]
            for weight, part in zip(weights, empty_together(weights, weights[0].dtype), strict=True):
                weight.data = part.copy_(weight)

    def head_norms(self) -> tuple[Tensor, ...]:
        """The factors of the norms of queries and keys; empty if the block has no such norms."""
        return ()

    def sinks_h(self) -> Tensor | None:
        """Attention's sink logits [H], or None."""
        return None

    def split(self, projected: Sequence[Tensor], first: int = 0) -> Heads:
        """Call `split_by` with the block's own `head_norms`."""
        return self.split_by(projected, self.head_norms(), first)

    @abstractmethod
    def split_by(self, projected: Sequence[Tensor], norms: Sequence[Tensor], first: int = 0) -> Heads:
        """Split the outputs of attention's input projections into heads.

        Args:
            projected: the outputs, each [B, S, columns].
            norms: the values of `head_norms`.
            first: the position of the first token in its sample.
        """

    @abstractmethod
    def join(
        self, heads: Heads, projected: Sequence[Tensor], norms: Sequence[Tensor], first: int = 0
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The reverse of `split_by` for gradients.

        Args:
            heads: the gradients of queries, keys and values.
            projected: the outputs of the projections; read only if there are `norms`.
            norms, first: as for `split_by`.

        Returns:
            The gradients of `projected`, and those of `norms`.
        """

    @abstractmethod
    def activation(self, *wide_bsf: Tensor) -> Tensor:
        """The input [B, S, F] of the feed-forward's output projection, from the outputs [B, S, F] of its
        input projections."""

    def qkv(self, normed_bsc: Tensor, first: int = 0) -> Heads:
        """Queries [B, H, S, D], keys and values [B, K, S, D]. `first` is as for `split_by`."""
        projected = [into(normed_bsc) for into in self._projections(self.family.attention_inputs)]
        return self.split(projected, first)

    def forward(
        self, x_bsc: Tensor, documents: Documents | None = None, place: Slice | None = None
    ) -> Tensor:
        """Run the block on x [B, S, C].

        Args:
            documents: attention does not cross their borders. They cover the sample's tokens up to the last
                of x.
            place: the slice of the microbatch that x is, if the microbatch is cut.
        """
        reach = Reach(window=self.window, documents=documents)
        at = None if place is None else place.of_block(self)
        packs = not self.storage.is_off or (self.is_plain and self._is_fused(x_bsc))
        if not (self.is_coded or self.always_packs or (packs and torch.is_grad_enabled())):
            return self._plain(x_bsc, reach, at)
        return self._feed_forward_half(self._attention_half(x_bsc, reach, at), at)

    def _attention_half(self, x_bsc: Tensor, reach: Reach, at: BlockSlice | None = None) -> Tensor:
        ways, (attention_inputs, (attention_output,), *_) = self._ways, self.products()
        first = 0 if at is None else at.first
        return attention_half(
            x_bsc,
            AttentionParts(
                storage=self.storage,
                layout=HeadLayout(
                    split=partial(self.split_by, first=first), join=partial(self.join, first=first)
                ),
                rank=self.rank,
                at=at,
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
            attention_inputs,
            attention_output,
            self.sinks_h(),
        )

    def _feed_forward_half(self, x_bsc: Tensor, at: BlockSlice | None = None) -> Tensor:
        ways, (*_, ffn_inputs, (ffn_output,)) = self._ways, self.products()
        return ffn_half(
            x_bsc,
            FfnParts(storage=self.storage, rank=self.rank, gelu=self.has_gelu, inputs=ways[2], down=ways[3]),
            Norms(
                first=None if self.norm_place == "output" else Norm.of(self.ffn_norm),
                last=self._last_norm(self.ffn_norm, "ffn_output_norm"),
            ),
            ffn_inputs,
            ffn_output,
        )

    def _last_norm(self, only: nn.Module, name: str) -> Norm | None:
        """The norm of what a half adds: its only norm, or with norms at both ends the norm called `name`."""
        if self.norm_place == "input":
            return None
        return Norm.of(only if self.norm_place == "output" else getattr(self, name))

    def _is_fused(self, x_bsc: Tensor) -> bool:
        """Whether the fused halves run although nothing is packed, as on GPUs in half precision."""
        half = compute_dtype(x_bsc) != torch.float32
        return self.fuses and half and dispatch.has_kernels(x_bsc.device)

    def _plain(self, x_bsc: Tensor, reach: Reach, at: BlockSlice | None) -> Tensor:
        """The block as plain autograd computes it."""
        attend = partial(self._attend, reach=reach, at=at)
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

    def _attend(self, x_bsc: Tensor, reach: Reach, at: BlockSlice | None) -> Tensor:
        heads = self.qkv(gather(x_bsc, self.rank), 0 if at is None else at.first)
        attended_bsc = attention(*heads, reach, at)
        return self._out_of(getattr(self, self.family.attention_output), attended_bsc)

    def _feed_forward(self, x_bsc: Tensor) -> Tensor:
        gathered_bsc = gather(x_bsc, self.rank)
        inputs = self._projections(self.family.ffn_inputs)
        inner_bsf = self.activation(*(projection(gathered_bsc) for projection in inputs))
        return self._out_of(getattr(self, self.family.ffn_output), inner_bsf)

    def _out_of(self, linear: nn.Linear | FrozenLinear, x: Tensor) -> Tensor:
        """A half's output projection, from all ranks' inputs [B, S, inputs / T] to this rank's [B, S / T,
        C]."""
        if self.rank.count == 1:
            whole: Tensor = linear(x)
            return whole
        partial = linear.partial(x) if isinstance(linear, FrozenLinear) else F.linear(x, linear.weight)
        return row_parallel(partial, linear.bias, self.rank)


def _size(together: Sequence[nn.Linear]) -> tuple[int, int]:
    """The outputs and inputs of projections that share their input."""
    return sum(linear.out_features for linear in together), together[0].in_features


def _embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without initial weights. To draw them on the meta device, torch imports its compiler,
    which takes seconds."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Embedding(nn.Module):
    """Token ids [B, S] int64 to hidden [B, S, C]. Learned positions, if any, restart at each document."""

    def __init__(self, model: ModelSection, rank: TensorRank) -> None:
        super().__init__()
        self.rank = rank
        self.tokens = _embedding(model.vocab, model.hidden)
        self.positions = None if family_of(model).rotates else _embedding(model.sequence, model.hidden)
        self.scale = sqrt(model.hidden) if model.scaled_embedding else 1.0

    def forward(
        self, tokens_bs: Tensor, documents: Documents | None = None, place: Slice | None = None
    ) -> Tensor:
        """`documents` and `place` are as for `Block.forward`."""
        x_bsc: Tensor = self.tokens(tokens_bs).float()
        if self.scale != 1.0:
            x_bsc = x_bsc * self.scale
        if self.positions is None:
            return x_bsc
        length = tokens_bs.shape[1]
        first = self.rank.index * length + (0 if place is None else place.first)
        if documents is not None:
            own = torch.arange(first, first + length, device=tokens_bs.device)
            within: Tensor = self.positions(own - documents.first_bs[:, first : first + length])
            return x_bsc + within.float()
        return x_bsc + self.positions.weight[first : first + length].float()


class Head(nn.Module):
    """Final norm and output projection: hidden [B, S, C] to logits [B, S, V]."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.norm = norm(model, model.hidden)
        self.output = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x_bsc: Tensor) -> Tensor:
        logits_bsv: Tensor = self.output(self.norm(x_bsc))
        return logits_bsv


class Gpt2Block(Block):
    """LayerNorm, multi-head attention (K = H), LayerNorm, tanh GELU; biases throughout."""

    family = GPT2

    def split_by(self, projected: Sequence[Tensor], norms: Sequence[Tensor], first: int = 0) -> Heads:
        (joined,) = projected
        heads_bsnhd = torch.unflatten(joined, -1, (3, -1, self.width))
        query_bhsd, key_bhsd, value_bhsd = heads_bsnhd.permute(2, 0, 3, 1, 4).unbind(0)
        return query_bhsd, key_bhsd, value_bhsd

    def join(
        self, heads: Heads, projected: Sequence[Tensor], norms: Sequence[Tensor], first: int = 0
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (torch.stack([part.transpose(1, 2) for part in heads], dim=2).flatten(2),), ()

    def activation(self, *wide_bsf: Tensor) -> Tensor:
        (up_bsf,) = wide_bsf
        return F.gelu(up_bsf, approximate="tanh")
