"""The `trellis` codec's loops by device: numba's on a CPU, Triton's on a GPU, with the same bits.

Without Triton, the CPU codes the lanes of tensors that are on a GPU.
"""

import torch

from kernels.common import dispatch
from kernels.trellis import lanes as trellis_lanes
from kernels.trellis import reference as trellis
from kernels.trellis.code import Coded
from kernels.trellis.factors import Factors
from kernels.trellis.grid import Grid


def encode(
    residual: torch.Tensor,
    classes: torch.Tensor,
    gain: float,
    where: Grid,
    family: int,
    salt: int | None = None,
) -> Coded:
    """`kernels.trellis.lanes.encode` on the device of `residual`. Triton's kernels do not wait for it."""
    if dispatch.has_kernels(residual.device, "trellis"):
        from kernels.trellis.triton import lanes as triton_trellis

        return triton_trellis.encode(residual, classes, gain, where, family, salt)
    coded = trellis_lanes.encode(residual.cpu(), classes.cpu(), gain, where, family, salt)
    return Coded(*(part.to(residual.device) for part in (coded.states, coded.counts, coded.words)))


def decode(
    states: torch.Tensor,
    counts: torch.Tensor,
    words: torch.Tensor,
    classes: torch.Tensor,
    where: Grid,
    family: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.trellis.lanes.decode`. Triton's kernels accept any states and counts, and do not wait for the
    device."""
    if dispatch.has_kernels(classes.device, "trellis"):
        from kernels.trellis.triton import decode as triton_trellis_decode

        return triton_trellis_decode.decode(states, counts, words, classes, where, family)
    n, whole = trellis_lanes.decode(states.cpu(), counts.cpu(), words.cpu(), classes.cpu(), where, family)
    return n.to(classes.device), whole.to(classes.device)


def join(coded: Coded, out: torch.Tensor) -> None:
    """Write the words of all groups one after the other to int16 `out`, which must have exactly their
    length."""
    if dispatch.has_kernels(out.device, "trellis"):
        from kernels.trellis.triton import lanes as triton_trellis

        triton_trellis.join(coded, out)
        return
    whole = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
    # Numpy copies: torch's copy may wake its threads, which keep cores busy for a while afterwards.
    words, joined = coded.words.cpu().numpy(), whole.numpy()
    used = 0
    for group, count in enumerate(coded.counts.tolist()):
        joined[used : used + count] = words[group, words.shape[1] - count :]
        used += count
    if whole is not out:
        out.copy_(whole)


def classes(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """`kernels.trellis.reference.classes` of int32 `[R]` and `[C]`."""
    if dispatch.has_kernels(row.device, "trellis"):
        from kernels.trellis.triton import restore as triton_trellis_restore

        return triton_trellis_restore.classes(row, column)
    return trellis.classes(row, column)


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
        trellis.restore(trellis.reconstruct(n, code, factors, salt), exponent, out)
