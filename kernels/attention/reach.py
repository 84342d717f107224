"""The limits of causal attention: a window of the latest keys, and the query's own document.

Shape legend: B batch, S sequence, N documents of all samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Where the documents that are packed into samples begin. A document begins at every sample's first
    token."""

    first_bs: Tensor
    """int32 [B, S]: the position in its sample at which a token's document begins."""
    ends: Tensor
    """int32 [N + 1]: where documents begin in the samples laid end to end.

    It is filled up with B S to a length that many microbatches share (`padded`).
    """

    @classmethod
    def of(cls, starts_bs: Tensor, device: torch.device) -> "Documents":
        """From bool [B, S] on the CPU, which is True where a document begins."""
        starts = starts_bs.clone()
        starts[:, 0] = True
        batch, length = starts.shape
        positions = torch.arange(length, dtype=torch.int32)
        first = torch.where(starts, positions, 0).cummax(1).values.to(torch.int32)
        begins = starts.flatten().nonzero().flatten().to(torch.int32)
        ends = torch.full((padded(len(begins), batch, length) + 1,), batch * length, dtype=torch.int32)
        ends[: len(begins)] = begins
        return cls(first_bs=first.to(device), ends=ends.to(device))

    def copy_(self, other: "Documents") -> None:
        """Copy another's values, which must have the same shapes."""
        self.first_bs.copy_(other.first_bs)
        self.ends.copy_(other.ends)

    def clone(self) -> "Documents":
        return Documents(first_bs=self.first_bs.clone(), ends=self.ends.clone())

    def like(self, other: "Documents") -> bool:
        """Whether the shapes allow `copy_`."""
        return self.first_bs.shape == other.first_bs.shape and self.ends.shape == other.ends.shape


def padded(documents: int, batch: int, length: int) -> int:
    """The number of documents to which their list is filled up with empty ones.

    The order of sums in a FlashAttention backward depends on it, so it is a function of the samples only. It
    is the same for all microbatches unless documents are shorter than 64 tokens on average.
    """
    usual = max(1, batch * length // 64)
    while usual < documents:
        usual *= 2
    return usual


@dataclass(frozen=True, kw_only=True, eq=False)
class Reach:
    """Which keys a query sees among its own and the earlier ones."""

    window: int = 0
    """The number of keys that a query sees: its own and those just before it. 0 means all."""
    documents: Documents | None = None

    @property
    def is_limited(self) -> bool:
        return self.window > 0 or self.documents is not None

    def allowed(self, length: int, device: torch.device, first: int = 0) -> Tensor:
        """bool [B or 1, 1, S - first, S]: whether a query (row, from position `first` on) sees a key
        (column)."""
        positions = torch.arange(length, device=device)
        keys, queries = positions[None, None], positions[None, first:, None]
        seen = keys <= queries
        if self.window:
            seen = seen & (keys > queries - self.window)
        if self.documents is not None:
            seen = seen & (keys >= self.documents.first_bs[:, first:length, None])
        return seen[:, None]

    def added(self, length: int, like: Tensor, first: int = 0) -> Tensor:
        """`allowed` as a term to add to scores: 0 or minus infinity, with the dtype and device of `like`."""
        seen = self.allowed(length, like.device, first)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


EVERYTHING = Reach()
