"""Where a stage's gradients add up between microbatches: beside the weights in fp32, or in e4m3.

In e4m3 (design section 4) each matrix's gradient is added to its block-wise codes the moment backward has
made it, and dropped: no more than one matrix's gradient exists in full at a time. Vectors are few and stay
fp32.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from kernels.fp8 import Fp8Gradient, accumulate_gradient, pack_gradient, unpack_gradient
from wire.errors import RunError


class Gradients(Protocol):
    """Main gradients by parameter."""

    def clear(self) -> None:
        """Drop all of them: before a step, after it, and when one is aborted."""
        ...

    def get(self, parameter: nn.Parameter) -> Tensor:
        """In the parameter's shape. Raises RunError if backward has not reached the parameter."""
        ...

    def stored(self, parameter: nn.Parameter) -> Tensor | Fp8Gradient:
        """As it is kept. Raises as `get`."""
        ...

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace one."""
        ...

    def add(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Add a microbatch's gradient, in the parameter's shape and any float dtype, to one that is in place.

        It asks work of the device alone, which a CUDA graph may capture and replay.
        """
        ...

    def added(self, parameters: Iterable[nn.Parameter]) -> None:
        """A replay has added to these."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that main gradients take now."""
        ...


class PlainGradients:
    """`Gradients` in each parameter's `.grad`, where autograd adds them up."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, in_place: bool = False) -> None:
        """`in_place`: gradients are there from the start and never move, as captured passes need it."""
        self._parameters = tuple(parameters)
        self._in_place = in_place
        if in_place:
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)

    def clear(self) -> None:
        if self._in_place:
            torch._foreach_zero_([gradient_of(parameter) for parameter in self._parameters])
            return
        for parameter in self._parameters:
            parameter.grad = None

    def get(self, parameter: nn.Parameter) -> Tensor:
        return gradient_of(parameter)

    stored = get

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        if self._in_place:
            gradient_of(parameter).copy_(value)
        else:
            parameter.grad = value.to(parameter.dtype)

    def add(self, parameter: nn.Parameter, value: Tensor) -> None:
        gradient_of(parameter).add_(value)

    def added(self, parameters: Iterable[nn.Parameter]) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return sum(0 if p.grad is None else p.grad.nbytes for p in self._parameters)


class Fp8Gradients:
    """`Gradients` of matrices in e4m3 blocks; those of vectors in `.grad`."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, in_place: bool = False) -> None:
        """`in_place`: as for `PlainGradients`; those of matrices never move."""
        everything = tuple(parameters)
        self._vectors = PlainGradients((p for p in everything if p.ndim < 2), in_place=in_place)
        self._main = {p: Fp8Gradient.zeros(p.numel(), p.device) for p in everything if p.ndim >= 2}
        self._reached: set[nn.Parameter] = set()
        self.when_added: Callable[[Fp8Gradient], None] | None = None
        """Called with each matrix's gradient once backward has added to it."""
        for parameter in self._main:
            parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]  # torch's

    def clear(self) -> None:
        for parameter, main in self._main.items():
            parameter.grad = None
            main.clear()
        self._reached.clear()
        self._vectors.clear()

    def get(self, parameter: nn.Parameter) -> Tensor:
        kept = self.stored(parameter)
        return unpack_gradient(kept).view(parameter.shape) if isinstance(kept, Fp8Gradient) else kept

    def stored(self, parameter: nn.Parameter) -> Tensor | Fp8Gradient:
        if parameter not in self._main:
            return self._vectors.get(parameter)
        if parameter not in self._reached:
            raise no_gradient(parameter)
        return self._main[parameter]

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter in self._main:
            pack_gradient(value.float().flatten(), self._main[parameter])
            self._reached.add(parameter)
        else:
            self._vectors.put(parameter, value)

    def add(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter in self._main:
            accumulate_gradient(self._main[parameter], value.flatten())
            self._reached.add(parameter)
        else:
            self._vectors.add(parameter, value)

    def added(self, parameters: Iterable[nn.Parameter]) -> None:
        self._reached.update(parameter for parameter in parameters if parameter in self._main)

    @property
    def nbytes(self) -> int:
        return sum(main.nbytes for main in self._main.values()) + self._vectors.nbytes

    @property
    def packed(self) -> Mapping[nn.Parameter, Fp8Gradient]:
        """Those of matrices, in the parameters' order."""
        return self._main

    def _add(self, parameter: Tensor) -> None:
        """Called by autograd once it has added to a matrix's `.grad`."""
        assert isinstance(parameter, nn.Parameter)
        self.add(parameter, gradient_of(parameter))
        parameter.grad = None
        if self.when_added is not None:
            self.when_added(self._main[parameter])


def gradient_of(tensor: Tensor) -> Tensor:
    """What backward left in `.grad`.

    Raises:
        RunError: backward has not run.
    """
    if tensor.grad is None:
        raise no_gradient(tensor)
    return tensor.grad


def no_gradient(tensor: Tensor) -> RunError:
    return RunError(f"a tensor of shape {list(tensor.shape)} has no gradient; backward must come first")
