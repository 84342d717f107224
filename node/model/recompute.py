"""Runs a function again in backward, so that only its input is kept until then.

It works like `torch.utils.checkpoint` without reentrance. But that imports torch's compiler at its first
call, which takes three seconds of a node's start, and memory for as long as the process lives. The bits and
the kept bytes are the same. When autograd asks for a tensor that the function saved, the function runs once
more, up to the last tensor that it saves. Each tensor is freed as soon as backward has used it.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`run(x)`, which runs again in backward.

    Args:
        run: must save the same tensors each time. It must not draw from torch's generators, because their
            state is not kept. Backward runs it under the autocast that is active now.
        x: any shape. The hooks for saved tensors that are active now see it.

    Raises:
        RuntimeError: in backward, if `run` saves other tensors than the first time.
    """
    if not torch.is_grad_enabled():
        return run(x)
    again = _Again(run, x)
    with saved_tensors_hooks(again.pack, _unpack):
        return run(x)


class _Saved:
    """A tensor that the function saved. Autograd holds this object in its place."""

    __slots__ = ("__weakref__", "again", "kind", "tensor")

    def __init__(self, again: "_Again", tensor: Tensor) -> None:
        self.again = again
        self.kind = _kind(tensor)
        self.tensor: Tensor | None = None
        """The tensor, from the second run until backward takes it."""


class _Again:
    """The function's second run. It lives while autograd may ask for any of its tensors."""

    def __init__(self, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._run = run
        self._autocast = _autocast(x.device.type)
        # Weak references, because autograd drops what backward is done with, and its tensor must go too.
        self._saved: list[weakref.ref[_Saved]] = []
        # It requires a gradient even if x does not, so that autograd keeps x.
        self._input = _Input.apply(torch.empty(0, requires_grad=True), x)  # type: ignore[no-untyped-call]

    def pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self, tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def run(self) -> None:
        """Run the function again and restore the saved tensors."""
        (x,) = self._input.grad_fn.saved_tensors
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            saved = self._saved[count]()
            count += 1
            tensor = tensor.detach()
            if saved is not None:
                if saved.kind != _kind(tensor):
                    raise RuntimeError(
                        f"what runs again in backward saved {_kind(tensor)} where it first saved {saved.kind}"
                    )
                saved.tensor = tensor
            if count == len(self._saved):
                raise _Enough
            return tensor

        try:
            with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad(), self._autocast():
                self._run(x)
        except _Enough:
            return
        raise RuntimeError(f"what runs again in backward saved {count} tensors, at first {len(self._saved)}")


class _Enough(Exception):
    """Raised when the last tensor is restored. The rest of the function's results are not needed."""


class _Input(torch.autograd.Function):
    """Lets autograd keep the input like any other tensor, under the active hooks."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        raise AssertionError("nothing follows from it")


def _unpack(saved: _Saved) -> Tensor:
    if saved.tensor is None:
        saved.again.run()
    tensor, saved.tensor = saved.tensor, None
    assert tensor is not None
    return tensor


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _autocast(device: str) -> Callable[[], AbstractContextManager[object]]:
    """Returns a context that enters the autocast that is active now."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype, enabled, cached)
