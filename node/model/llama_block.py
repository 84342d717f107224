"""The block of Llama and of families like it, and rotary positions. Shapes are as in `node.model.blocks`."""

from collections.abc import Sequence
from math import ceil, floor, log, pi, sqrt
from typing import cast

import torch
from torch import Tensor, nn

from kernels.common import layers as reference
from kernels.layers import ops as layers
from node.config.schema import ModelSection
from node.model.blocks import Block, RMSNorm
from node.model.families.known import LLAMA
from node.model.families.llama import yarn_attention
from node.model.storage import Storage
from node.model.stored_layers import Heads
from node.model.tensor_rank import TensorRank


def rotary_frequencies(model: ModelSection, *, windowed: bool = False) -> Tensor:
    """The rotary frequencies, in radians per position, for each pair of a head's elements: float32 [D / 2].

    They include the model's scaling. `llama3` divides low frequencies by the factor, leaves high frequencies
    unchanged and interpolates between them (Llama 3.1). `yarn` interpolates too (arXiv 2309.00071, section
    3.2). The frequencies are computed on the CPU for every device, so that every stage has the same bits.

    Args:
        windowed: for blocks with an attention window. They may have a base of their own, and then no scaling.
    """
    exponents = torch.arange(0, model.width, 2, dtype=torch.float32, device="cpu") / model.width
    if windowed and model.window_theta:
        return 1.0 / model.window_theta**exponents
    if model.rope_scaling == "yarn":
        return _yarn_frequencies(model, model.rope_theta**exponents)
    frequencies: Tensor = 1.0 / model.rope_theta**exponents
    if model.rope_scaling == "none":
        return frequencies
    scaled = frequencies / model.rope_factor
    if model.rope_scaling == "linear":
        return scaled
    wavelengths = 2 * pi / frequencies
    share = (model.rope_original / wavelengths - model.rope_low) / (model.rope_high - model.rope_low)
    between = (1 - share) * scaled + share * frequencies
    blended = torch.where(wavelengths > model.rope_original / model.rope_low, scaled, between)
    return torch.where(wavelengths < model.rope_original / model.rope_high, frequencies, blended)


def _yarn_frequencies(model: ModelSection, lengths: Tensor) -> Tensor:
    """YaRN's frequencies. `lengths` are the inverses of the unscaled frequencies."""

    def pair(turns: float) -> float:
        """The (fractional) pair of elements that rotates this often within the original context."""
        angle = model.rope_original / (turns * 2 * pi)
        return model.width * log(angle) / (2 * log(model.rope_theta))

    first, last = pair(model.rope_beta_fast), pair(model.rope_beta_slow)
    if model.rope_truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, model.width - 1)
    pairs = torch.arange(model.width // 2, dtype=torch.float32, device="cpu")
    # As in transformers, equal bounds are moved apart.
    scaled = ((pairs - first) / ((last if last != first else last + 0.001) - first)).clamp(0, 1)
    kept = 1 - scaled
    return 1.0 / (model.rope_factor * lengths) * (1 - kept) + 1.0 / lengths * kept


def rotary_scale(model: ModelSection) -> float:
    """YaRN's factor for queries and keys; 1 without YaRN."""
    if model.rope_scaling != "yarn":
        return 1.0
    return model.rope_attention or yarn_attention(model.rope_factor)


class Rotary(nn.Module):
    """Rotary position embedding over whole heads; the first half of a head rotates against the second
    (Llama's convention).

    The tables depend on the config only and are not weights.
    """

    cos_sd: Tensor
    sin_sd: Tensor

    def __init__(self, sequence: int, frequencies: Tensor, device: torch.device, scale: float = 1.0) -> None:
        """
        Args:
            sequence: the number of positions in the tables.
            frequencies: radians per position, from `rotary_frequencies`.
            scale: from `rotary_scale`.
        """
        super().__init__()
        angles = torch.outer(torch.arange(sequence, dtype=torch.float32, device="cpu"), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if scale != 1.0:
            cos, sin = cos * scale, sin * scale
        self.register_buffer("cos_sd", cos.to(device), persistent=False)
        self.register_buffer("sin_sd", sin.to(device), persistent=False)

    def forward(self, query_bhsd: Tensor, key_bksd: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys. `first` is the position of their first token."""
        tables = self._from(first, query_bhsd.shape[-2])
        if torch.is_grad_enabled():
            return reference.rotate(query_bhsd, *tables), reference.rotate(key_bksd, *tables)
        return layers.rotate(query_bhsd, *tables), layers.rotate(key_bksd, *tables)

    def back(self, query_bhsd: Tensor, key_bksd: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """The gradients of the inputs: the inverse rotation, with the same scale."""
        tables = self._from(first, query_bhsd.shape[-2])
        return layers.rotate(query_bhsd, *tables, back=True), layers.rotate(key_bksd, *tables, back=True)

    def _from(self, first: int, length: int) -> tuple[Tensor, Tensor]:
        return self.cos_sd[first : first + length], self.sin_sd[first : first + length]


class LlamaBlock(Block):
    """RMSNorm, rotary grouped-query attention, RMSNorm, SwiGLU."""

    family = LLAMA

    def __init__(
        self, model: ModelSection, index: int, tables: object, storage: Storage, rank: TensorRank
    ) -> None:
        super().__init__(model, index, tables, storage, rank)
        # The choice of the base does not depend on the length of samples.
        everything, windowed = cast(tuple[Rotary, Rotary], tables)
        rotary = windowed if model.window > 0 and index not in model.no_window else everything
        self.rotary = None if index in model.no_rope else rotary
        self.norms_heads = model.qk_norm == "head"
        self.query_factor = sqrt(model.width / model.query_scale) if model.query_scale else 1.0

    @classmethod
    def tables(cls, model: ModelSection, device: torch.device) -> tuple["Rotary", "Rotary"]:
        """The tables of blocks that see all keys, and those of blocks with a window."""
        everything = Rotary(model.sequence, rotary_frequencies(model), device, rotary_scale(model))
        if not model.window_theta:
            return everything, everything
        return everything, Rotary(model.sequence, rotary_frequencies(model, windowed=True), device)

    def head_norms(self) -> tuple[Tensor, ...]:
        norms = (self._modules.get(name) for name in ("query_norm", "key_norm"))
        return tuple(norm.scale() for norm in norms if isinstance(norm, RMSNorm))

    def split_by(self, projected: Sequence[Tensor], norms: Sequence[Tensor], first: int = 0) -> Heads:
        heads = [self._to_be_normed(part) for part in projected]
        for number, scale in enumerate(norms):
            part = heads[number]
            if torch.is_grad_enabled():
                heads[number] = reference.norm(part, scale, None, self.norm_eps)
            else:
                heads[number] = layers.norm(part, scale, None, self.norm_eps, part.dtype)
        query_bhsd, key_bksd, value_bksd = (
            torch.unflatten(part.flatten(2), -1, (-1, self.width)).transpose(1, 2) for part in heads
        )
        if self.query_factor != 1.0:
            query_bhsd = query_bhsd * self.query_factor
        if self.rotary is None:
            return query_bhsd, key_bksd, value_bksd
        query_bhsd, key_bksd = self.rotary(query_bhsd, key_bksd, first)
        return query_bhsd, key_bksd, value_bksd

    def _to_be_normed(self, projected_bsn: Tensor) -> Tensor:
        """The tensor whose last dimension is normalized: the whole projection, or its heads [B, S, H, D]."""
        return torch.unflatten(projected_bsn, -1, (-1, self.width)) if self.norms_heads else projected_bsn

    def join(
        self, heads: Heads, projected: Sequence[Tensor], norms: Sequence[Tensor], first: int = 0
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        query_bhsd, key_bksd, value_bksd = heads
        if self.rotary is not None:
            query_bhsd, key_bksd = self.rotary.back(query_bhsd, key_bksd, first)
        if self.query_factor != 1.0:
            query_bhsd = query_bhsd * self.query_factor
        grads = [part.transpose(1, 2).flatten(2) for part in (query_bhsd, key_bksd, value_bksd)]
        of_norms = []
        for number, scale in enumerate(norms):
            grad, x = self._to_be_normed(grads[number]), self._to_be_normed(projected[number])
            of_x, of_scale, _ = layers.norm_backward(grad, x, None, scale, None, self.norm_eps)
            grads[number] = of_x.flatten(2)
            of_norms.append(of_scale.to(scale.dtype))
        return tuple(grads), tuple(of_norms)

    def activation(self, *wide_bsf: Tensor) -> Tensor:
        gate_bsf, up_bsf = wide_bsf
        return reference.gated(gate_bsf, up_bsf, self.has_gelu)
