"""The `trellis` codec's path and code (`kernels.trellis.code`) on a CPU, group by group.

`kernels.trellis.triton.lanes` does the same on a GPU. Every number is an integer, or each operation rounds it
once, so the words are the same.
"""

from collections.abc import Callable

import numpy as np
import torch

from kernels.common.loops import run
from kernels.trellis.code import Coded
from kernels.trellis.grid import Grid
from kernels.trellis.loops import decode as trellis_loops_decode
from kernels.trellis.loops import dither
from kernels.trellis.loops import encode as trellis_loops
from kernels.trellis.tables import tables


def encode(
    residual: torch.Tensor,
    classes: torch.Tensor,
    gain: float,
    where: Grid,
    family: int,
    salt: int | None = None,
) -> Coded:
    """Code fp32 `[E]` with the classes uint8 `[E]`.

    Args:
        gain: 64 divided by the step, an fp32 number.
        salt: Selects the elements' dither (`kernels.trellis.loops.dither`). None adds no dither.
    """
    if salt is not None:
        residual, gain = dither.added(residual, gain, salt), 1.0
    states = np.empty((where.groups, where.lanes), dtype=np.int32)
    words = np.empty((where.groups, where.capacity), dtype=np.uint16)
    values, numbers, codes = residual.numpy(), classes.numpy(), tables(family).codes

    def one(group: int) -> int:
        start, stop = where.bounds(group)
        return int(
            trellis_loops.encode(
                values,
                numbers,
                np.float32(gain),
                start,
                stop,
                where.lanes,
                codes,
                trellis_loops.INVERSE,
                states[group],
                words[group],
            )
        )

    counts = torch.tensor(_each(one, where.groups), dtype=torch.int32)
    return Coded(torch.from_numpy(states), counts, torch.from_numpy(words.view(np.int16)))


def decode(
    states: torch.Tensor,
    counts: torch.Tensor,
    words: torch.Tensor,
    classes: torch.Tensor,
    where: Grid,
    family: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """n, int32 `[E]`, and whether the code is valid, bool `[]`. If it is not, n is meaningless.

    Args:
        states: int32 `[groups, lanes]`, in [2**15, 2**31).
        counts: int64 `[groups]`, the number of words of each group. They add up to at most W.
        words: int16 `[W]`, those of all groups one after the other.
        classes: uint8 `[E]`.
    """
    out = np.empty(classes.numel(), dtype=np.int32)
    numbers, slots = classes.numpy(), tables(family).slots
    stream = words.numpy().view(np.uint16)
    ends = counts.cumsum(0).tolist()
    state = states.numpy().copy()

    def one(group: int) -> bool:
        start, stop = where.bounds(group)
        own = stream[ends[group - 1] if group else 0 : ends[group]]
        return bool(
            trellis_loops_decode.decode(numbers, start, stop, where.lanes, slots, state[group], own, out)
        )

    whole = all(_each(one, where.groups))
    return torch.from_numpy(out), torch.tensor(whole)


def join(coded: Coded, out: torch.Tensor) -> None:
    """Write the words of all groups one after the other to int16 `out`, which must have exactly their
    length."""
    # Numpy copies: torch's copy may wake its threads, which keep cores busy for a while afterwards.
    words, joined, used = coded.words.numpy(), out.numpy(), 0
    for group, count in enumerate(coded.counts.tolist()):
        joined[used : used + count] = words[group, words.shape[1] - count :]
        used += count


def _each(one: Callable[[int], int | bool], groups: int) -> list[int | bool]:
    """The results of `one` for every group."""
    found: list[int | bool] = [0] * groups

    def work(group: int, _: int) -> None:
        found[group] = one(group)

    run(work, [(group, group + 1) for group in range(groups)])
    return found
