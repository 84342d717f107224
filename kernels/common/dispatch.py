"""Chooses the implementation for a device, and has the decoders' error codes and the Triton kernels' launch
sizes.

It does not import Triton, which is installed only on machines with a GPU.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch

from kernels.common import devices
from kernels.common.devices import Kind, Room

PARTS = ("attention", "experts", "fixed", "fp8", "layers", "orthogonal", "storage", "tah", "trellis")
"""Groups of kernels that can be withdrawn together, by what they compute."""

# The errors that a decoder finds. Of several errors the largest number is reported.
BAD_CODE = 1
BAD_SCALE = 2
NON_FINITE = 4


def kind_of(device: torch.device) -> Kind:
    """What this device can do. For a GPU, its driver must be loaded."""
    if device.type != "cuda":
        return devices.TABLE.get(device.type, devices.CPU)
    if torch.version.hip is not None:
        return devices.of_architecture(torch.cuda.get_device_properties(device).gcnArchName)
    return devices.of_capability(*torch.cuda.get_device_capability(device))


def in_double(x: torch.Tensor) -> torch.Tensor:
    """x in float64, on its device if that computes in float64, else on the CPU."""
    return (x if kind_of(x.device).float64 else x.cpu()).double()


def has_kernels(device: torch.device, part: str = "") -> bool:
    """Whether there are Triton kernels for tensors on such a device. With `part`, also whether that part has
    not been withdrawn (`withdraw`)."""
    return part not in _withdrawn and _has_kernels(device)


@cache
def _has_kernels(device: torch.device) -> bool:
    return kind_of(device).kernels and find_spec("triton") is not None


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def by_device(part: str, module: str, reference: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`reference`, or where there are the kernels of `part`, the function with its name in that module. The
    first argument, a tensor, says on which device; it must be given by its position."""

    @wraps(reference)
    def chosen(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        first = args[0]
        assert isinstance(first, torch.Tensor)
        if has_kernels(first.device, part):
            result: Result = getattr(import_module(module), reference.__name__)(*args, **named)
            return result
        return reference(*args, **named)

    return chosen


_PLAIN = "THINWIRE_PLAIN"
"""An environment variable with `PARTS`, separated by commas, that compute without Triton kernels."""
_withdrawn = {part for part in os.environ.get(_PLAIN, "").split(",") if part}


def withdrawn() -> list[str]:
    """The `PARTS` that compute without their Triton kernels."""
    return sorted(_withdrawn)


def withdraw(part: str) -> None:
    """Compute without the Triton kernels of `part`, one of `PARTS`, from now on: in this process and in those
    that it starts later."""
    assert part in PARTS
    _withdrawn.add(part)
    os.environ[_PLAIN] = ",".join(sorted(_withdrawn))


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles that a program handles (a power of two, at least 16), and its warps. They change no bit."""

    tiles: int
    warps: int


FIXED_ENCODE = Launch(tiles=128, warps=4)
FIXED_FINISH = Launch(tiles=2048, warps=16)
FIXED_DECODE = Launch(tiles=32, warps=2)

TAH_MEASURE = Launch(tiles=128, warps=4)
TAH_QUANTIZE = Launch(tiles=32, warps=1)
TAH_DECODE = Launch(tiles=32, warps=1)
# For programs that only handle metadata.
TAH_SELECT = Launch(tiles=4096, warps=16)


@cache
def room(device: torch.device) -> Room:
    """How large tiles of products may be. The CPU, on which the interpreter runs, counts as the smallest
    GPU."""
    return kind_of(device).room


@cache
def most_warps(device: torch.device) -> int:
    return kind_of(device).warps


@cache
def limits_registers(device: torch.device) -> bool:
    """Whether a launch may limit the registers of a thread (`Kind.limits_registers`)."""
    return kind_of(device).limits_registers
