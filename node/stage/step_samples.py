"""A step's samples, divided into microbatches on the stage's device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from node.model.labels import BatchPart


def cut_samples(part: BatchPart, batch: np.ndarray, size: int, device: torch.device) -> tuple[Tensor, ...]:
    """A part of the samples [n, sequence], `size` at a time."""
    whole = torch.from_numpy(batch)
    if part is not BatchPart.DOCUMENTS:  # which are listed on the CPU
        whole = whole.to(device)
    return torch.split(whole, size)


def numbered(found: Sequence[Tensor], count: int, numbers: Sequence[int]) -> dict[int, Tensor]:
    """Microbatches by number, from all `count` microbatches of the step or only from those that the row
    computes."""
    own = range(count) if len(found) == count else sorted(numbers)
    return dict(zip(own, found, strict=False))
