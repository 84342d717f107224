"""Main gradients: they sum a stage's gradients over microbatches, in fp32 or e4m3.

In fp32, autograd sums the gradients of fp32 weights in `.grad`. The gradients of bf16 weights are bf16. Each
is added to an fp32 main gradient as soon as backward has computed it, and then dropped.

In e4m3, each matrix's gradient is added to block-wise codes as soon as backward has computed it, and then
dropped. So at most one matrix's gradient exists in full, or those of half a block that packs its activations.
Vectors are few and stay fp32. Steps of more than `MOST_TO_NEAREST` microbatches round stochastically.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from kernels.common import dispatch
from kernels.common.matrices import following
from kernels.fp8.ops import accumulate_gradient
from kernels.fp8.products import weight_gradient
from kernels.fp8.reference import Draw, Fp8Gradient, pack_gradient, unpack_gradient
from kernels.fp8.rows import Coded
from node.model.page_locked import GRADIENT_PIECE
from wire.errors import RunError

MOST_TO_NEAREST = 16
"""The most microbatches per step for which sums in e4m3 are rounded to nearest.

Up to this number, rounding to nearest is closer to the exact sum, because each stochastic rounding has a
larger error. From about 32 microbatches on, each addend is less than half a code's step and is lost, so the
sum stops growing; stochastic rounding keeps it right on average. The recorded convergence runs used 8
microbatches.
"""


def _after_adding(parameter: nn.Parameter, method: Callable[[Tensor], None]) -> None:
    """Make autograd call `method` after it has added to the parameter's `.grad`.

    Torch calls its hook also if a function returned no gradient, as when the product has added it. The hook
    holds the method's object weakly, because a cycle through a torch hook is never collected.
    """
    held = weakref.WeakMethod(method)

    def hook(changed: Tensor) -> None:
        bound = held()
        if bound is not None and changed.grad is not None:
            bound(changed)

    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's


class PlainGradients:
    """Main gradients by parameter, in fp32. Those of fp32 parameters are in `.grad`, where autograd adds them
    up."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, in_place: bool = False) -> None:
        """With `in_place`, gradients exist from the start and never move, as captured passes need it."""
        everything = tuple(parameters)
        self._own = tuple(p for p in everything if p.dtype == torch.float32)
        self._others = tuple(p for p in everything if p.dtype != torch.float32)
        self._main: dict[nn.Parameter, Tensor] = {}
        """The main gradients of `_others` that exist."""
        self._in_place = in_place
        if in_place:
            for parameter in self._own:
                parameter.grad = torch.zeros_like(parameter)
            for parameter in self._others:
                self._main[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        for parameter in self._others:
            _after_adding(parameter, self._take)

    def clear(self) -> None:
        """Drop all gradients: before a step, after it, and when one is aborted."""
        for parameter in self._others:
            parameter.grad = None
        if self._in_place:
            kept = [gradient_of(parameter) for parameter in self._own] + list(self._main.values())
            if kept:
                torch._foreach_zero_(kept)
            return
        self._main.clear()
        for parameter in self._own:
            parameter.grad = None

    def get(self, parameter: nn.Parameter) -> Tensor:
        """The gradient in the parameter's shape.

        Raises:
            RunError: backward has not reached the parameter.
        """
        if parameter.dtype == torch.float32:
            return gradient_of(parameter)
        if parameter not in self._main:
            raise no_gradient(parameter)
        return self._main[parameter]

    stored = get
    """The gradient as it is kept."""

    def part(self, parameter: nn.Parameter, first: int, count: int) -> Tensor:
        """Elements of the gradient as it is kept, flat. `first` is the start of a block. Raises as `get`."""
        return self.get(parameter).view(-1)[first : first + count]

    def take(self, parameter: nn.Parameter) -> Tensor:
        """The gradient as it is kept, for the caller to keep. It restarts at 0. Raises as `get`."""
        kept = self.get(parameter)
        if self._in_place:
            taken = kept.clone()
            kept.zero_()
            return taken
        if parameter.dtype == torch.float32:
            parameter.grad = None
        else:
            del self._main[parameter]
        return kept

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace a gradient by a copy of `value`, because a step scales gradients in place."""
        single = parameter.dtype == torch.float32
        kept = parameter.grad if single else self._main.get(parameter)
        if kept is not None or self._in_place:
            self.get(parameter).copy_(value)
        elif single:
            parameter.grad = value.to(torch.float32, copy=True)
        else:
            self._main[parameter] = value.to(torch.float32, copy=True)

    def add(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Add a microbatch's gradient, in the parameter's shape and any float dtype.

        A CUDA graph may capture and replay this call.
        """
        self.get(parameter).add_(value)

    def add_product(
        self, parameters: Sequence[nn.Parameter], grads: Tensor | Coded, rows: Tensor | Coded
    ) -> None:
        """Add a microbatch's `grads.t() @ rows`: the stacked gradients of these matrices.

        A CUDA graph may capture and replay this call.

        Args:
            parameters: matrices with the same number of columns.
            grads: [T, rows of all parameters], in half precision on a GPU, or the codes of its columns.
            rows: [T, columns], likewise.
        """
        whole = self._together(parameters)
        if isinstance(grads, Tensor) and isinstance(rows, Tensor):
            # The product accumulates into the sum, so no result is stored, rounded and read again.
            torch.addmm(whole, grads.t(), rows, out_dtype=torch.float32, out=whole)
        else:
            # Products in e4m3 with a scale per row return bf16 and cannot accumulate.
            whole.add_(weight_gradient(grads, rows, torch.bfloat16))

    def _together(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The matrix whose rows are these parameters' main gradients. They are moved into one matrix if
        necessary."""
        kept = [self.unpacked(parameter) for parameter in parameters]
        there = [main for main in kept if main is not None]
        whole = following(there) if len(there) == len(kept) else None
        if whole is not None:
            return whole
        rows = [len(parameter) for parameter in parameters]
        first = parameters[0]
        whole = torch.zeros(sum(rows), first.shape[1], dtype=torch.float32, device=first.device)
        for parameter, main, part in zip(parameters, kept, torch.split(whole, rows), strict=True):
            if main is not None:
                part.copy_(main)
            if parameter.dtype == torch.float32:
                parameter.grad = part
            else:
                self._main[parameter] = part
        return whole

    def added(self, parameters: Iterable[nn.Parameter]) -> None:
        """Declare that a replay has added to these parameters' gradients."""

    def begin_microbatch(self, salt: int) -> None:
        """Round later additions by random bits from this 32-bit salt, also in replays."""

    def unpacked(self, parameter: nn.Parameter) -> Tensor | None:
        """The fp32 gradient, not a copy; None if it is in e4m3 or missing."""
        return self._main.get(parameter, parameter.grad)

    def kept(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The tensors that hold these parameters' gradients. Missing gradients have none."""
        unpacked = (self.unpacked(parameter) for parameter in parameters)
        return [gradient for gradient in unpacked if gradient is not None]

    def make_zero(self, parameters: Iterable[nn.Parameter]) -> None:
        """Overwrite the tensors of `kept` with 0."""
        for gradient in self.kept(parameters):
            gradient.zero_()

    @property
    def nbytes(self) -> int:
        own = sum(0 if p.grad is None else p.grad.nbytes for p in self._own)
        return own + sum(main.nbytes for main in self._main.values())

    def _take(self, parameter: Tensor) -> None:
        """Add a `.grad` that is not fp32 to its main gradient. Autograd calls it after it has added to
        `.grad`."""
        assert isinstance(parameter, nn.Parameter)
        gradient = gradient_of(parameter)
        parameter.grad = None
        if parameter in self._main:
            # The sum is fp32, whatever dtype is added.
            self._main[parameter].add_(gradient)
        else:
            self._main[parameter] = gradient.float()


class Fp8Gradients:
    """The same with matrices in e4m3 blocks and vectors in `.grad`."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        in_place: bool = False,
        salts: Mapping[nn.Parameter, int] | None = None,
        away: Collection[nn.Parameter] = (),
    ) -> None:
        """
        Args:
            in_place: as for `PlainGradients`. The gradients of matrices never move.
            salts: 32 bits per matrix, from which additions draw their stochastic rounding. Without salts they
                round to nearest.
            away: matrices whose gradients start without memory (`node.model.streamed`).
        """
        everything = tuple(parameters)
        self._vectors = PlainGradients((p for p in everything if p.ndim < 2), in_place=in_place)
        self._main: dict[nn.Parameter, Fp8Gradient] = {}
        for parameter in everything:
            if parameter.ndim >= 2:
                main = self._main[parameter] = Fp8Gradient.zeros(parameter.numel(), parameter.device)
                if parameter in away:
                    main.codes.untyped_storage().resize_(0)
                    main.exponents.untyped_storage().resize_(0)
        self._reached: set[nn.Parameter] = set()
        # It is always on the device, because captured additions read it at each replay.
        self._microbatch = {
            device: torch.zeros(1, dtype=torch.int64, device=device)
            for device in {p.device for p in self._main if salts}
        }
        self._draws = {p: Draw(self._microbatch[p.device], salts[p]) for p in self._main if salts}
        self.when_added: Callable[[Fp8Gradient], None] | None = None
        """Called with a matrix's gradient each time backward has added to it."""
        for parameter in self._main:
            _after_adding(parameter, self._add)

    def clear(self) -> None:
        for parameter, main in self._main.items():
            parameter.grad = None
            # Gradients in host memory are set to 0 when they arrive (`node.model.streamed.Streamed.blank`).
            if main.codes.untyped_storage().nbytes():
                main.clear()
        self._reached.clear()
        self._vectors.clear()

    def get(self, parameter: nn.Parameter) -> Tensor:
        kept = self.stored(parameter)
        if not isinstance(kept, Fp8Gradient):
            return kept
        if parameter.numel() <= GRADIENT_PIECE:
            return unpack_gradient(kept).view(parameter.shape)
        # In pieces, because unpacking needs half as much memory again.
        values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        for part, piece in zip(_pieces(kept), torch.split(values.view(-1), GRADIENT_PIECE), strict=True):
            piece.copy_(unpack_gradient(part))
        return values

    def stored(self, parameter: nn.Parameter) -> Tensor | Fp8Gradient:
        if parameter not in self._main:
            return self._vectors.get(parameter)
        if parameter not in self._reached:
            raise no_gradient(parameter)
        return self._main[parameter]

    def part(self, parameter: nn.Parameter, first: int, count: int) -> Tensor | Fp8Gradient:
        kept = self.stored(parameter)
        if not isinstance(kept, Fp8Gradient):
            return kept.view(-1)[first : first + count]
        return kept.part(first, first + count)

    def take(self, parameter: nn.Parameter) -> Tensor | Fp8Gradient:
        kept = self.stored(parameter)
        if not isinstance(kept, Fp8Gradient):
            return self._vectors.take(parameter)
        taken = Fp8Gradient(kept.codes.clone(), kept.exponents.clone())
        kept.clear()
        self._reached.discard(parameter)
        return taken

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter in self._main:
            # In pieces, because packing allocates tensors of the same length.
            pieces = torch.split(value.flatten(), GRADIENT_PIECE)
            for part, piece in zip(_pieces(self._main[parameter]), pieces, strict=True):
                pack_gradient(piece.float(), part)
            self._reached.add(parameter)
        else:
            self._vectors.put(parameter, value)

    def add(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter in self._main:
            accumulate_gradient(self._main[parameter], value.flatten(), self._draws.get(parameter))
            self._reached.add(parameter)
        else:
            self._vectors.add(parameter, value)

    def add_product(
        self, parameters: Sequence[nn.Parameter], grads: Tensor | Coded, rows: Tensor | Coded
    ) -> None:
        whole = weight_gradient(grads, rows, torch.bfloat16)
        products = torch.split(whole, [len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, products, strict=True):
            self.add(parameter, part)
            if self.when_added is not None:
                self.when_added(self._main[parameter])

    def added(self, parameters: Iterable[nn.Parameter]) -> None:
        self._reached.update(parameter for parameter in parameters if parameter in self._main)

    def begin_microbatch(self, salt: int) -> None:
        for microbatch in self._microbatch.values():
            # This is queued on the device, so additions that are still queued keep their bits.
            microbatch.fill_(salt)

    def unpacked(self, parameter: nn.Parameter) -> Tensor | None:
        return None if parameter in self._main else self._vectors.unpacked(parameter)

    def kept(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        mains = (self._main[parameter] for parameter in parameters if parameter in self._main)
        return [part for main in mains for part in (main.codes, main.exponents)]

    def make_zero(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in self._main:
                self._main[parameter].clear()

    @property
    def nbytes(self) -> int:
        return sum(main.nbytes for main in self._main.values()) + self._vectors.nbytes

    @property
    def packed(self) -> Mapping[nn.Parameter, Fp8Gradient]:
        """The gradients of matrices, in the parameters' order."""
        return self._main

    def _add(self, parameter: Tensor) -> None:
        """Add a matrix's `.grad` to its codes. Autograd calls it after it has added to `.grad`."""
        assert isinstance(parameter, nn.Parameter)
        self.add(parameter, gradient_of(parameter))
        parameter.grad = None
        if self.when_added is not None:
            self.when_added(self._main[parameter])


Gradients = PlainGradients | Fp8Gradients


def norms(gradients: Sequence[Tensor | Fp8Gradient]) -> list[list[Tensor]]:
    """The norms of each `GRADIENT_PIECE` of each gradient, in order: float64 [] on its device, not waited
    for.

    On a CPU, torch copies to float64 for such a norm. A copy of a whole gradient would take twice its memory,
    so gradients are cut into pieces.
    """
    pieces = [
        [] if isinstance(gradient, Fp8Gradient) else list(torch.split(gradient.flatten(), GRADIENT_PIECE))
        for gradient in gradients
    ]
    plain = iter(_norms([piece for own in pieces for piece in own]))
    return [
        [_norms([unpack_gradient(part)])[0] for part in _pieces(gradient)]
        if isinstance(gradient, Fp8Gradient)
        else [next(plain) for _ in own]
        for gradient, own in zip(gradients, pieces, strict=True)
    ]


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The norms in float64. On a GPU this takes one pass over all tensors and no copy, unlike
    `torch.linalg.vector_norm`, which is used elsewhere."""
    if tensors and not dispatch.kind_of(tensors[0].device).float64:
        return [dispatch.in_double(torch.linalg.vector_norm(tensor.float())) for tensor in tensors]
    return torch._foreach_norm(tensors, 2.0, torch.float64) if tensors else ()


def _pieces(gradient: Fp8Gradient) -> Iterator[Fp8Gradient]:
    """The same codes and exponents, in pieces of `GRADIENT_PIECE` elements."""
    starts = range(0, gradient.codes.numel(), GRADIENT_PIECE)
    return (gradient.part(first, first + GRADIENT_PIECE) for first in starts)


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient that backward left in `.grad`.

    Raises:
        RunError: backward has not run.
    """
    if tensor.grad is None:
        raise no_gradient(tensor)
    return tensor.grad


def no_gradient(tensor: Tensor) -> RunError:
    return RunError(f"a tensor of shape {list(tensor.shape)} has no gradient; backward must come first")
