"""Matrices that are parts of one matrix. They are joined without a copy if they are contiguous in memory.

Shape legend: T tokens, N outputs, K inputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def stacked(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices [N, K] stacked, in `dtype`: a view if they are contiguous in memory, else a copy."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    whole = following(parts)
    if whole is not None and whole.dtype == dtype:
        return whole
    return torch.cat([part.to(dtype) for part in parts])


def empty_together(like: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Uninitialized matrices of these shapes [N, K], stacked in one piece of memory."""
    rows = [len(matrix) for matrix in like]
    whole = torch.empty(sum(rows), like[0].shape[1], dtype=dtype, device=like[0].device)
    return torch.split(whole, rows)


def following(parts: Sequence[Tensor]) -> Tensor | None:
    """The matrix whose rows are these matrices [N, K]; None if they are not contiguous in memory."""
    first, place = parts[0], parts[0].storage_offset()
    for part in parts:
        if (
            not part.is_contiguous()
            or part.dtype != first.dtype
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.storage_offset() != place
        ):
            return None
        place += part.numel()
    width = first.shape[-1]
    return first.as_strided((sum(len(part) for part in parts), width), (width, 1))


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """[..., N] of the same tokens as [T, all N]: a view if they are neighbouring columns, else a copy."""
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    first = flat[0]
    if len(flat) == 1:
        return first
    place, width = first.storage_offset(), sum(part.shape[1] for part in flat)
    for part in flat:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.storage_offset() != place
            or part.stride() != (first.stride(0), 1)
            or first.stride(0) < width
        ):
            return torch.cat(flat, dim=1)
        place += part.shape[1]
    return first.as_strided((len(first), width), (first.stride(0), 1))
