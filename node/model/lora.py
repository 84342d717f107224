"""LoRA: frozen projections with trained low-rank adapters (Hu et al. 2021, arXiv 2106.09685).

A projection becomes `x W^T + b + alpha / rank * (dropout(x) A^T) B^T`, with A [rank, inputs] and B [outputs,
rank]. Everything else of the model is frozen. Only A and B are parameters, so only they have gradients,
moments, snapshots and sync. The base weights come from the run's start: every node that takes over a stage
builds them again and loads the adapters alone.

Frozen matrices of blocks are kept in `[lora] base`: in the block formats of `kernels.blockfloat`, and
unpacked where they are used, one at a time (QLoRA, arXiv 2305.14314, keeps them in its own 4-bit format).
Embedding and head are kept in bfloat16, vectors in float32. With `base = "float32"` all of them are.

Dropout draws no random state: its bits are a hash of (seed, step, microbatch, unit, projection, element), so
a step that runs again, or runs on another split, drops the same elements. The microbatch's salt is on the
device, where a captured pass reads it at every replay, and is kept for backward instead of a mask.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.blockfloat import ops
from kernels.common.random_bits import mixed_on_device, random_bits, signed
from node.config.schema import LoraSection, ModelSection
from node.model.lora_shapes import DOWN, UP, WHOLE
from node.model.rng import salt
from node.model.storage import PACKED
from node.model.tensor_rank import compute_dtype
from node.model.units import is_block

_DROP_BITS = 24
"""Of a random number that decides whether an element is dropped."""


class DropoutSource:
    """The salt of the microbatch that goes forward next, for all adapters of a chunk."""

    def __init__(self, device: torch.device) -> None:
        self.salt = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self, value: int) -> None:
        """Set it to 32 bits. The device does so in the order of its work."""
        self.salt.fill_(signed(value))


class FrozenWeight(nn.Module):
    """A matrix that is not trained, as float32, bfloat16 or packed in blocks."""

    kept: Tensor

    def __init__(self, weight: Tensor, form: str) -> None:
        """
        Args:
            weight: [outputs, inputs], float32.
            form: one of `FORMS`.
        """
        super().__init__()
        self.shape, self.form = weight.shape, form
        self.register_buffer("kept", self._packed(weight), persistent=False)

    def fill(self, weight: Tensor) -> None:
        """Replace it, in place."""
        self.kept.copy_(self._packed(weight.to(self.kept.device)))

    def _packed(self, weight: Tensor) -> Tensor:
        if self.form == WHOLE:
            return weight
        if self.form == "bf16":
            return weight.to(torch.bfloat16)
        return cast(Tensor, ops.store(weight, PACKED[self.form]))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, [outputs, inputs]."""
        if self.form in (WHOLE, "bf16"):
            return self.kept.to(dtype)
        return cast(Tensor, ops.restore(self.kept, list(self.shape), PACKED[self.form], dtype))


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """How an adapter's input is dropped."""

    share: float
    source: DropoutSource
    place: int
    """32 bits that identify this adapter."""

    def salt(self) -> Tensor:
        """Of the microbatch that goes forward, int32 [1]: a copy, as the source moves on before backward."""
        return mixed_on_device(self.source.salt ^ signed(self.place))

    def __call__(self, x: Tensor, drawn: Tensor) -> Tensor:
        """x with elements set to zero and the others scaled up, or the same of a gradient of x."""
        bits = random_bits(x.numel(), drawn, x.device, bits=_DROP_BITS).view(x.shape)
        kept = (bits >= round(self.share * (1 << _DROP_BITS))).to(x.dtype)
        return x * kept.mul_(1.0 / (1.0 - self.share))


class FrozenLinear(nn.Module):
    """A projection whose weight and bias are frozen, with an adapter or without one."""

    bias: Tensor | None
    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None

    def __init__(self, linear: nn.Linear, form: str) -> None:
        super().__init__()
        self.weight = FrozenWeight(linear.weight.detach(), form)
        own = cast(Tensor | None, linear.bias)
        self.register_buffer("bias", None if own is None else own.detach(), persistent=False)
        self.register_parameter(DOWN, None)
        self.register_parameter(UP, None)
        self.scale = 0.0
        self.dropout: Dropout | None = None

    def adapt(self, down: Tensor, up: Tensor, scale: float, dropout: Dropout | None) -> None:
        """Add an adapter: A [rank, inputs], B [outputs, rank]."""
        self.lora_A, self.lora_B = nn.Parameter(down), nn.Parameter(up)
        self.scale, self.dropout = scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.dropout.salt() if self.dropout is not None and torch.is_grad_enabled() else None
        made = _Projection.apply(x, self.lora_A, self.lora_B, self, drawn)  # type: ignore[no-untyped-call]
        return cast(Tensor, made)


class _Projection(torch.autograd.Function):
    """Keeps the input (of adapted projections alone), `dropout(x) A^T` and the salt for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor | None, up: Tensor | None, layer: FrozenLinear, drawn: Tensor | None
    ) -> Tensor:
        dtype = compute_dtype(x)
        ctx.layer, ctx.dtypes = layer, (x.dtype, dtype)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            bias = None if layer.bias is None else layer.bias.to(dtype)
            result = F.linear(x, layer.weight.dense(dtype), bias)
            if down is None or up is None:
                ctx.save_for_backward()
                return result
            fed = x if drawn is None or layer.dropout is None else layer.dropout(x, drawn)
            inner = F.linear(fed, down.to(dtype))
            result.add_(F.linear(inner, up.to(dtype)), alpha=layer.scale)
            ctx.save_for_backward(x, inner, down, up, drawn)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: FrozenLinear = ctx.layer
        given, dtype = ctx.dtypes
        grad = grads[0].to(dtype)
        of_x = grad @ layer.weight.dense(dtype) if ctx.needs_input_grad[0] else None
        saved = ctx.saved_tensors  # read once: a block that runs again hands them out once
        if not saved:
            return None if of_x is None else of_x.to(given), None, None, None, None
        x, inner, down, up, drawn = saved
        rows = grad.reshape(-1, grad.shape[-1])
        of_up = (rows.t() @ inner.reshape(-1, inner.shape[-1])).mul_(layer.scale)
        of_inner = (grad @ up.to(dtype)).mul_(layer.scale)
        drop = None if drawn is None else layer.dropout
        fed = x if drop is None else drop(x, drawn)
        of_down = of_inner.reshape(-1, of_inner.shape[-1]).t() @ fed.reshape(-1, fed.shape[-1])
        if of_x is not None:
            through = of_inner @ down.to(dtype)
            of_x.add_(through if drop is None else drop(through, drawn))
            of_x = of_x.to(given)
        return of_x, of_down.to(down.dtype), of_up.to(up.dtype), None, None


def freeze(
    module: nn.Module,
    unit: str,
    model: ModelSection,
    lora: LoraSection,
    adapters: dict[str, Tensor],
    source: DropoutSource,
) -> None:
    """Freeze all weights of a unit's module, in place, and put adapters on its projections.

    Args:
        module: with float32 weights.
        adapters: the values of `trained_specs`, by name.
        source: of the chunk, for dropout.
    """
    form = lora.base if is_block(unit) or lora.base == WHOLE else "bf16"
    for path, linear in [(path, one) for path, one in module.named_modules() if isinstance(one, nn.Linear)]:
        frozen = FrozenLinear(linear, form)
        if f"{path}.{DOWN}" in adapters:
            # Without the seed: the microbatch's salt has it.
            place = salt(0, step=0, layer=unit, purpose=f"dropout before {path}")
            frozen.adapt(
                adapters[f"{path}.{DOWN}"],
                adapters[f"{path}.{UP}"],
                lora.alpha / lora.rank,
                Dropout(share=lora.dropout, source=source, place=place) if lora.dropout else None,
            )
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, frozen)
    for part in module.modules():
        if isinstance(part, FrozenLinear):
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            weight = parameter.detach()
            half = weight.ndim >= 2 and form != WHOLE
            delattr(part, name)
            part.register_buffer(name, weight.to(torch.bfloat16) if half else weight, persistent=False)


def load_frozen(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the frozen weights of a unit's module by float32 tensors, by their names in the whole model."""
    for name, value in weights.items():
        path, _, kind = name.rpartition(".")
        part = module.get_submodule(path)
        kept = part.weight if isinstance(part, FrozenLinear) and kind == "weight" else getattr(part, kind)
        if isinstance(kept, FrozenWeight):
            kept.fill(value)
        else:
            kept.copy_(value)


def merged(weight: Tensor, down: Tensor, up: Tensor, lora: LoraSection) -> Tensor:
    """A projection's weight with its adapter added, float32 [outputs, inputs]."""
    return weight.float() + (up.float() @ down.float()) * (lora.alpha / lora.rank)
