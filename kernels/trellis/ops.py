"""Decoding of the `trellis` codec by device: loops on a CPU, Triton's kernels on a GPU, the same bits."""

import torch

from kernels.common import dispatch
from kernels.trellis import lanes as trellis_lanes
from kernels.trellis import reference as trellis
from kernels.trellis.factors import Factors
from kernels.trellis.loops import matrices as matrix_loops

# Triton's kernels accept any states and counts, and do not wait for the device.
decode = dispatch.by_device("trellis", f"{__package__}.triton.decode", trellis_lanes.decode)
classes = dispatch.by_device("trellis", f"{__package__}.triton.restore", trellis.classes)


def restore(
    n: torch.Tensor,
    code: int,
    factors: Factors | None,
    exponent: int,
    out: torch.Tensor,
    salt: int | None = None,
) -> None:
    """Reconstruct n, int32 `[E]`, into contiguous `out` `[..., C]`. Overwrites n.

    Args:
        code: The code of the step (`kernels.trellis.reference.step_of`).
        factors: The prediction to add, or None.
        exponent: The result is multiplied by 2**exponent.
        salt: Selects the dither to subtract, or None.
    """
    if dispatch.has_kernels(n.device, "trellis"):
        from kernels.trellis.triton import restore as triton_trellis_restore

        triton_trellis_restore.restore(n, code, factors, exponent, out, salt)
    else:
        matrix_loops.restore(trellis.reconstruct(n, code, factors, salt), exponent, out)
