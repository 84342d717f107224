"""LoRA: frozen projections with trained low-rank adapters (Hu et al. 2021, arXiv 2106.09685).

A projection becomes `x W^T + b + alpha / rank * (dropout(x) A^T) B^T`, with A [rank, inputs] and B [outputs,
rank]. Everything else in the model is frozen. Only A and B are parameters, so only they have gradients,
moments, snapshots and sync. The base weights come from the run's start: every node that takes over a stage
builds them again and loads only the adapters.

The frozen matrices of blocks are kept in the form `[lora] base`: in the block formats of
`kernels.blockfloat`. They are unpacked one at a time where they are used (QLoRA, arXiv 2305.14314, does so
with its own 4-bit format). Embedding and head are kept in bfloat16, vectors in float32. With `base =
"float32"` all of them are float32.

Dropout reads no generator's state. Its bits are a hash of (seed, step, microbatch, unit, projection,
element), so a step that runs again, on another split or on several devices, drops the same elements. The
microbatch's salt is on the device, where a captured pass reads it at every replay. Backward keeps the salt
instead of a mask.

With T tensor-parallel ranks, a projection that is cut by outputs has all of A and its rows of B; one that is
cut by inputs has its columns of A and all of B. The adapters' results are part of the partial sums of the
frozen products, so they need no collective of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.blockfloat import ops
from kernels.common.random_bits import mixed_on_device, signed
from kernels.experts.ops import PackedExperts, Weights
from kernels.layers import ops as layers
from node.config.schema import LoraSection, ModelSection
from node.model.lora_shapes import DOWN, UP, WHOLE, frozen_form, trained_specs
from node.model.products import AS_IT_IS, Way
from node.model.rng import salt
from node.model.storage import PACKED
from node.model.tensor_rank import TensorRank, compute_dtype
from node.model.units import is_block, parameter_specs


class DropoutSource:
    """The dropout salt of the microbatch that goes forward next. All adapters of a chunk share it."""

    def __init__(self, device: torch.device) -> None:
        self.salt = torch.zeros(1, dtype=torch.int32, device=device)
        self.row = 0
        """This device's number among the devices of its node that hold other samples of the microbatch."""

    def begin(self, value: int) -> None:
        """Set the salt to 32 bits, in the order of the device's work."""
        self.salt.fill_(signed(value))


class FrozenWeight(nn.Module):
    """A matrix that is not trained, kept as float32, as bfloat16 or packed in blocks."""

    kept: Tensor

    def __init__(self, weight: Tensor, device: torch.device, form: str, experts: int = 0) -> None:
        """
        Args:
            weight: [outputs, inputs], float32, on any device.
            device: where the weight is kept, and packed.
            form: one of `FORMS`.
            experts: how many matrices are stacked in `weight`; each of them is packed by itself. 0 for a
                single matrix.
        """
        super().__init__()
        self.shape, self.form, self.experts = weight.shape, form, experts
        self.register_buffer("kept", self._packed(weight, device), persistent=False)

    def fill(self, weight: Tensor) -> None:
        """Replace the weight in place."""
        self.kept.copy_(self._packed(weight, self.kept.device))

    def _packed(self, weight: Tensor, device: torch.device) -> Tensor:
        # In float32, a large vocabulary's weight or that of all experts may not fit on the device.
        if self.form in (WHOLE, "bf16"):
            return weight.to(device, torch.bfloat16 if self.form == "bf16" else torch.float32)
        bits = PACKED[self.form]
        if self.experts:
            return PackedExperts.of(self._each(weight), bits, device).packed
        return ops.store(weight.to(device), bits)

    def _each(self, weight: Tensor) -> Tensor:
        return weight.view(self.experts, -1, self.shape[1])

    def of_experts(self, dtype: torch.dtype) -> Weights:
        """The experts' matrices [E, outputs, inputs]: packed if they are kept packed, else in `dtype`."""
        if self.form in (WHOLE, "bf16"):
            return self._each(self.kept.to(dtype))
        outputs, inputs = self.shape[0] // self.experts, self.shape[1]
        return PackedExperts(packed=self.kept, outputs=outputs, inputs=inputs, bits=PACKED[self.form])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, [outputs, inputs]."""
        if self.form in (WHOLE, "bf16"):
            return self.kept.to(dtype)
        if self.experts:
            packed = cast(PackedExperts, self.of_experts(dtype))
            return torch.cat([packed.dense(expert, dtype) for expert in range(self.experts)])
        return ops.restore(self.kept, list(self.shape), PACKED[self.form], dtype)


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """The dropout of an adapter's input."""

    share: float
    source: DropoutSource
    place: int
    """32 bits that identify this adapter."""
    first: int = 0
    """This device's first column of the whole input."""
    columns: int = 0
    """The columns of the whole input; 0 if this device has all of them."""

    def salt(self, microbatch: Tensor) -> Tensor:
        """The salt of this adapter and microbatch, int32 [1], from the microbatch's salt."""
        return mixed_on_device(microbatch ^ signed(self.place))

    def __call__(self, x: Tensor, drawn: Tensor) -> Tensor:
        """x, or a gradient of x, with some elements set to zero and the others scaled up.

        An element is numbered by its position in the microbatch's whole input, whichever device holds it.
        """
        width = self.columns or x.shape[-1]
        rows = x.numel() // x.shape[-1]
        first = self.source.row * rows * width + self.first
        return layers.drop(x, drawn, self.share, first=first, stride=width)


class FrozenLinear(nn.Module):
    """A projection whose weight and bias are frozen, optionally with an adapter."""

    bias: Tensor | None
    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None

    def __init__(self, linear: nn.Linear, device: torch.device, form: str, experts: int = 0) -> None:
        """`device`, `form` and `experts` are as for `FrozenWeight`."""
        super().__init__()
        self.weight = FrozenWeight(linear.weight.detach(), device, form, experts)
        own = cast(Tensor | None, linear.bias)
        self.register_buffer("bias", None if own is None else own.detach().to(device), persistent=False)
        self.register_parameter(DOWN, None)
        self.register_parameter(UP, None)
        self.scale = 0.0
        self.dropout: Dropout | None = None

    def adapt(self, down: Tensor, up: Tensor, scale: float, dropout: Dropout | None) -> None:
        """Add an adapter: A [rank, inputs], B [outputs, rank]."""
        self.lora_A, self.lora_B = nn.Parameter(down), nn.Parameter(up)
        self.scale, self.dropout = scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_to(x, True)

    def partial(self, x: Tensor) -> Tensor:
        """The product without the bias: a tensor-parallel rank's part of the sum."""
        return self._apply_to(x, False)

    def _apply_to(self, x: Tensor, biased: bool) -> Tensor:
        microbatch = self.drawn() if torch.is_grad_enabled() else None
        args = x, self.lora_A, self.lora_B, self, microbatch, biased
        return cast(Tensor, _Projection.apply(*args))  # type: ignore[no-untyped-call]

    def drawn(self) -> Tensor | None:
        """The salt of the microbatch that goes forward; None without dropout. It is a copy, since the source
        moves on before backward."""
        return None if self.dropout is None else self.dropout.source.salt.clone()

    # ---- the arithmetic, without autograd; `drawn` is None if nothing is dropped

    def fed(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """The input of the adapter: x after dropout."""
        if drawn is None or self.dropout is None:
            return x
        return self.dropout(x, self.dropout.salt(drawn))

    def multiplied(
        self, x: Tensor, down: Tensor | None, up: Tensor | None, drawn: Tensor | None, *, biased: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs [..., outputs] in x's dtype, and the result of A, [..., rank]; None without an
        adapter."""
        bias = None if self.bias is None or not biased else self.bias.to(x.dtype)
        result = F.linear(x, self.weight.dense(x.dtype), bias)
        if down is None or up is None:
            return result, None
        inner = F.linear(self.fed(x, drawn), down.to(x.dtype))
        return result.add_(F.linear(inner, up.to(x.dtype)), alpha=self.scale), inner

    def of_inner(self, grad: Tensor, up: Tensor) -> Tensor:
        """The gradient of the result of A."""
        return (grad @ up.to(grad.dtype)).mul_(self.scale)

    def of_input(
        self, grad: Tensor, of_inner: Tensor | None, down: Tensor | None, drawn: Tensor | None
    ) -> Tensor:
        """The gradient of x."""
        gradient = grad @ self.weight.dense(grad.dtype)
        if of_inner is None or down is None:
            return gradient
        return gradient.add_(self.fed(of_inner @ down.to(grad.dtype), drawn))

    def of_adapter(
        self, grad: Tensor, of_inner: Tensor, fed: Tensor, inner: Tensor, down: Tensor, up: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of A and B, in their dtypes."""
        of_up = (_rows(grad).t() @ _rows(inner)).mul_(self.scale)
        return (_rows(of_inner).t() @ _rows(fed)).to(down.dtype), of_up.to(up.dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Projection(torch.autograd.Function):
    """The projection for autograd. It saves the salt, `dropout(x) A^T` and, if there is an adapter, the
    input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor | None,
        up: Tensor | None,
        layer: FrozenLinear,
        drawn: Tensor | None,
        biased: bool,
    ) -> Tensor:
        dtype = compute_dtype(x)
        ctx.layer, ctx.dtypes = layer, (x.dtype, dtype)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            result, inner = layer.multiplied(x, down, up, drawn, biased=biased)
            if inner is None:
                ctx.save_for_backward()
            else:
                ctx.save_for_backward(x, inner, down, up, drawn)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: FrozenLinear = ctx.layer
        given, dtype = ctx.dtypes
        grad = grads[0].to(dtype)
        saved = ctx.saved_tensors  # read once: a block that runs again hands them out once
        needed = ctx.needs_input_grad[0]
        if not saved:
            of_x = layer.of_input(grad, None, None, None).to(given) if needed else None
            return of_x, None, None, None, None, None
        x, inner, down, up, drawn = saved
        of_inner = layer.of_inner(grad, up)
        of_x = layer.of_input(grad, of_inner, down, drawn).to(given) if needed else None
        of_down, of_up = layer.of_adapter(grad, of_inner, layer.fed(x, drawn), inner, down, up)
        return of_x, of_down, of_up, None, None, None


class AdaptedProjections:
    """The counterpart of `node.model.products.Projections` for frozen weights. It trains the adapters.

    It keeps nothing of its input for backward. `gradients` gets the input again and multiplies it by A again.
    """

    way: Way = AS_IT_IS

    def __init__(
        self, layers: Sequence[FrozenLinear], adapters: Sequence[Tensor | None], drawn: Tensor | None
    ) -> None:
        """
        Args:
            layers: projections with the same input.
            adapters: A and B of each layer in turn; None and None for a layer without an adapter.
            drawn: the salt of the microbatch; None without dropout.
        """
        self._all = list(zip(layers, adapters[::2], adapters[1::2], strict=True))
        self._drawn = drawn
        self._of_inner: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def needs_input(self) -> bool:
        """Whether the weights' gradients need the input."""
        return any(down is not None for _, down, _ in self._all)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """The outputs [..., N] of each projection."""
        return [layer.multiplied(x, down, up, self._drawn)[0] for layer, down, up in self._all]

    def row_parallel(self, x: Tensor, rank: TensorRank) -> Tensor:
        """The output of a single projection, summed as by `node.model.tensor_rank.row_parallel`."""
        ((layer, down, up),) = self._all
        if rank.count == 1:
            return self(x)[0]
        output = rank.reduce_scatter(layer.multiplied(x, down, up, self._drawn, biased=False)[0])
        return output if layer.bias is None else output.add_(layer.bias)

    def backward(self, grads: Sequence[Tensor], codes: object = None) -> Tensor:
        """The gradient of the input from the gradients of the outputs."""
        gradient: Tensor | None = None
        for number, (grad, (layer, down, _)) in enumerate(zip(grads, self._all, strict=True)):
            part = layer.of_input(grad, self._inner_gradient(number, grad), down, self._drawn)
            gradient = part if gradient is None else gradient.add_(part)
        assert gradient is not None
        return gradient

    def gradients(self, grads: Sequence[Tensor], x: Tensor | None, own: object = None) -> list[Tensor | None]:
        """The gradients of A and B in turn; None and None without an adapter. x may be None if there are no
        adapters."""
        gradients: list[Tensor | None] = []
        for number, (grad, (layer, down, up)) in enumerate(zip(grads, self._all, strict=True)):
            of_inner = self._inner_gradient(number, grad)
            if of_inner is None or down is None or up is None:
                gradients += [None, None]
                continue
            assert x is not None
            fed = layer.fed(x, self._drawn)
            inner = F.linear(fed, down.to(x.dtype))
            gradients += layer.of_adapter(grad, of_inner, fed, inner, down, up)
        return gradients

    def _inner_gradient(self, number: int, grad: Tensor) -> Tensor | None:
        layer, _, up = self._all[number]
        if up is not None and number not in self._of_inner:
            self._of_inner[number] = layer.of_inner(grad, up)
        return self._of_inner.get(number)


def freeze(
    module: nn.Module,
    unit: str,
    model: ModelSection,
    lora: LoraSection,
    adapters: dict[str, Tensor],
    source: DropoutSource,
    rank: TensorRank,
) -> None:
    """Freeze all weights of a unit's module in place, and add adapters to its projections.

    Args:
        module: a module with float32 weights in main memory. Each is packed on the device by itself, because
            a mixture's block may not fit there in float32.
        adapters: the values of `trained_specs` by name, or the `rank`'s shards of them, on the device.
        source: the chunk's source of dropout salts, on the device.
    """
    device = source.salt.device
    widths = {spec.name: spec.shape[-1] for spec in trained_specs(model, lora, unit)}
    specs = {spec.name: spec for spec in parameter_specs(model, unit)}
    forms = {name: frozen_form(lora, spec, in_block=is_block(unit)) for name, spec in specs.items()}
    for path in [path for path, part in module.named_modules() if isinstance(part, nn.Linear)]:
        name = f"{path}.weight"
        linear = cast(nn.Linear, module.get_submodule(path))
        frozen = FrozenLinear(linear, device, forms[name], specs[name].experts)
        if f"{path}.{DOWN}" in adapters:
            # The seed is not needed here: it is part of the microbatch's salt.
            place = salt(0, step=0, layer=unit, purpose=f"dropout before {path}")
            down, whole = adapters[f"{path}.{DOWN}"], widths[f"{path}.{DOWN}"]
            first = rank.index * down.shape[1] if down.shape[1] < whole else 0
            dropout = Dropout(share=lora.dropout, source=source, place=place, first=first, columns=whole)
            up, scale = adapters[f"{path}.{UP}"], lora.alpha / lora.rank
            frozen.adapt(down, up, scale, dropout if lora.dropout else None)
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, frozen)
    for part in module.modules():
        if isinstance(part, FrozenLinear):
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            half = parameter.ndim >= 2 and lora.base != WHOLE
            weight = parameter.detach().to(device, torch.bfloat16 if half else torch.float32)
            delattr(part, name)
            part.register_buffer(name, weight, persistent=False)


def load_frozen(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the frozen weights of a unit's module by float32 tensors, keyed by their names in the whole
    model."""
    for name, value in weights.items():
        path, _, kind = name.rpartition(".")
        part = module.get_submodule(path)
        kept = part.weight if isinstance(part, FrozenLinear) and kind == "weight" else getattr(part, kind)
        if isinstance(kept, FrozenWeight):
            kept.fill(value)
        else:
            kept.copy_(value)


def merged(weight: Tensor, down: Tensor, up: Tensor, lora: LoraSection, experts: int = 0) -> Tensor:
    """A projection's weight plus its adapter's product, float32 [outputs, inputs]. With `experts`, each
    expert has its own adapter."""
    each = max(experts, 1)
    added = up.float().view(each, -1, lora.rank) @ down.float().view(each, lora.rank, -1)
    return weight.float() + added.flatten(0, 1) * (lora.alpha / lora.rank)
