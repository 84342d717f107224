"""Torch operators of Python functions."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

_KEPT = "__dynamo_disable"


def operator(
    name: str, *, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., object]], CustomOpDef]:
    """`torch.library.custom_op`, without importing torch's compiler at the first call.

    Torch imports the compiler to keep it from compiling the function. In a process that compiles nothing,
    this takes seconds, and memory for as long as the process lives. If the compiler is loaded, torch works as
    usual.
    """

    def register(function: Callable[..., object]) -> CustomOpDef:
        custom = torch.library.custom_op(name, mutates_args=mutates_args)(function)
        guarded = custom._backend_fns.get(None)
        kernel: Any = getattr(guarded, "__wrapped__", None)
        if guarded is None or kernel is None:
            return custom  # another version of torch

        def call(*args: object, **named: object) -> object:
            if "torch._dynamo" in sys.modules:
                vars(kernel).pop(_KEPT, None)
                return guarded(*args, **named)
            return kernel(*args, **named)

        # Before torch asks the compiler for a function that it leaves alone, it looks for one under this
        # name.
        vars(kernel)[_KEPT] = call
        return custom

    return register
