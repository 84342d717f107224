"""What each kind of device can do: one table for all code that depends on it.

A kind has the name at the end of a node's `Hardware.arithmetic`: `sm_86` for an NVIDIA GPU of compute
capability 8.6, `gfx942` for an AMD GPU, `mps`, `xpu` or `cpu`. This module imports no torch, because the
coordinator uses it too.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache

KIB = 1 << 10
LARGE_SHARED = 200 * KIB
"""From this size of shared memory on, kernels use their large tiles."""


class Room(Enum):
    """How large the tiles of products may be on a device. The bits of their sums depend on it."""

    LARGE = "200 KiB of shared memory a program, as H100, H200 and B200 have"
    SMALL = "64 KiB and more"
    NONE = "the same, and no tensor cores that Triton uses: GPUs before A100"


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    kernels: bool = True
    """Triton compiles the program's kernels for it. Other devices use plain torch and the CPU's loops."""
    bfloat16: bool = True
    """It multiplies bfloat16 at full speed. GPUs without it multiply bfloat16 many times slower than
    float32."""
    fp8_products: bool = False
    """It multiplies e4m3. CPUs emulate this for tests."""
    fp8_conversions: bool = False
    """Triton converts to and from e4m3 in one instruction. On other devices the kernels spell out the
    conversion."""
    shared_bytes: int = 0
    """The shared memory that one program of a kernel may have, in bytes."""
    lanes: int = 32
    """The number of threads in a warp."""
    limits_registers: bool = False
    """A launch may limit the registers of a thread. Triton supports this only for NVIDIA GPUs."""
    graphs: bool = True
    """Passes can be captured as graphs."""
    flash_attention: bool = False
    """Torch's FlashAttention operators run on it and sum in a fixed order."""
    wide_flash_backward: bool = False
    """FlashAttention's backward has enough shared memory for heads of 193 to 224."""
    own_attention: bool = False
    """cuDNN's forward with our own backward is the fastest attention in a fixed order, as measured."""
    main_memory: bool = False
    """Its memory is the machine's main memory. Codecs run on the CPU, whose loops are faster."""
    float64: bool = True
    """It computes in float64."""

    @property
    def warps(self) -> int:
        """The most warps that one program of a kernel may have: 1,024 threads."""
        return 1024 // self.lanes

    @property
    def room(self) -> Room:
        if self.shared_bytes >= LARGE_SHARED:
            return Room.LARGE
        return Room.SMALL if self.kernels and self.bfloat16 else Room.NONE


_TURING = Kind(name="sm_75", bfloat16=False, shared_bytes=64 * KIB, limits_registers=True)
_AMPERE = replace(
    _TURING,
    name="sm_80",
    bfloat16=True,
    shared_bytes=163 * KIB,
    flash_attention=True,
    wide_flash_backward=True,
)
_SMALL_AMPERE = replace(_AMPERE, name="sm_86", shared_bytes=99 * KIB, wide_flash_backward=False)
_ADA = replace(_SMALL_AMPERE, name="sm_89", fp8_products=True, fp8_conversions=True)
_HOPPER = replace(
    _ADA,
    name="sm_90",
    shared_bytes=227 * KIB,
    wide_flash_backward=True,
    own_attention=True,
)
_BLACKWELL = replace(_HOPPER, name="sm_100", wide_flash_backward=False, own_attention=False)
_SMALL_BLACKWELL = replace(_BLACKWELL, name="sm_120", shared_bytes=99 * KIB)
_NVIDIA = {
    (7, 5): _TURING,
    (8, 0): _AMPERE,
    (8, 6): _SMALL_AMPERE,
    (8, 9): _ADA,
    (9, 0): _HOPPER,
    (10, 0): _BLACKWELL,
    (12, 0): _SMALL_BLACKWELL,
}

# Graphs and the order of sums in FlashAttention are not measured on AMD GPUs.
_INSTINCT = Kind(name="gfx942", shared_bytes=64 * KIB, lanes=64, graphs=False)
_RADEON_7000 = replace(_INSTINCT, name="gfx1100", lanes=32)
_RADEON_9000 = replace(_RADEON_7000, name="gfx1200")
_AMD = {"gfx9": _INSTINCT, "gfx11": _RADEON_7000, "gfx12": _RADEON_9000}
"""The kinds by the first characters of the architecture's name."""

_PLAIN = Kind(name="", kernels=False, graphs=False)
CPU = replace(_PLAIN, name="cpu", fp8_products=True, main_memory=True)
MPS = replace(_PLAIN, name="mps", main_memory=True, float64=False)
XPU = replace(_PLAIN, name="xpu")

TABLE = {kind.name: kind for kind in (*_NVIDIA.values(), *_AMD.values(), MPS, XPU, CPU)}


@cache
def of_capability(major: int, minor: int) -> Kind:
    """The kind of an NVIDIA GPU. A GPU that is not in the table counts as the newest one before it; GPUs
    before Turing run without kernels."""
    earlier = [known for known in _NVIDIA if known <= (major, minor)]
    if not earlier:
        return replace(_TURING, name=f"sm_{major}{minor}", kernels=False, graphs=False)
    return replace(_NVIDIA[max(earlier)], name=f"sm_{major}{minor}")


def of_architecture(name: str) -> Kind:
    """The kind of an AMD GPU, from torch's name for it, such as `gfx942:sramecc+:xnack-`. RDNA 2 and older
    run without kernels."""
    short = name.partition(":")[0]
    for begins, kind in _AMD.items():
        # gfx90a belongs to gfx942's family. gfx906 and gfx900 have no products in bfloat16.
        if short.startswith(begins) and short not in ("gfx900", "gfx906", "gfx908"):
            return replace(kind, name=short)
    return replace(_PLAIN, name=short, bfloat16=False)


def of_target(arch: int | str) -> Kind:
    """The kind for which Triton compiles: 86 is compute capability 8.6, `gfx942` an AMD GPU."""
    return of_capability(*divmod(arch, 10)) if isinstance(arch, int) else of_architecture(arch)


@lru_cache(64)
def of_arithmetic(arithmetic: str) -> Kind:
    """The kind of a node's first device, from its `Hardware.arithmetic`. That text is untrusted; a CPU is
    assumed if it is unknown."""
    name = arithmetic.rpartition(", ")[2]
    if name.startswith("sm_") and name[3:].isdecimal() and len(name) in (5, 6):
        return of_target(int(name[3:]))
    if name.startswith("gfx"):
        return of_architecture(name)
    return TABLE.get(name, CPU)
