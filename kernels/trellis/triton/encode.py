"""`trellis-R`'s encoder on a GPU, from the tensor to its payload, without a transfer to the host.

Carries out a `Planner`'s decision: codes some rows to measure what they take, then all of them, at as many
steps as `wire.codecs.trellis` tries at most. Attempts that are no longer needed return at once. Sizes of
buffers, numbers of programs and of launches follow from the shape and the rate alone, so a call can be
captured in a CUDA graph once a call of the same shape and rate has run.
"""

import torch
import triton

from kernels.trellis.grid import trial_grid
from kernels.trellis.settings import Settings
from kernels.trellis.tables import FAMILIES
from kernels.trellis.triton import search as searching
from kernels.trellis.triton import state as at
from kernels.trellis.triton import write as writing
from kernels.trellis.triton.lanes import Lanes
from kernels.trellis.triton.plan import MODEL, PLANS, Planner

# Elements a program handles; they change no bit.
_BLOCK = 1024
_OCTETS = 128
_CLASS_ROWS, _CLASS_COLUMNS = 32, 256
_WORD_PROGRAMS = 8


def encode(
    x: torch.Tensor, payload: torch.Tensor, settings: Settings, salt: int | None = None
) -> torch.Tensor:
    """Fill uint8 `payload` (16-byte aligned) with the code of x, fp32, bf16 or fp16 `[R, C]`, contiguous.

    Zeros for zeros, if nothing fits, and for what is not finite. Returns the exponent, int32 0-d, or
    `kernels.common.tiles.NON_FINITE`. Never waits.
    """
    planner = Planner(x, settings)
    planner.run()
    payload.zero_()
    _fill(planner, payload, salt)
    return planner.exponent


def _fill(planner: Planner, payload: torch.Tensor, salt: int | None) -> None:
    """Code some rows with both families of tables, then all of them, step after step; write the best."""
    settings, device = planner.settings, planner.x.device
    some_rows = settings.measured_rows
    some_grid = trial_grid(some_rows * settings.columns)
    some = Lanes.empty(some_grid, device, slots=FAMILIES, at_once=FAMILIES)
    lanes = Lanes.empty(settings.grid, device, slots=2, at_once=1)
    values = torch.empty(some_grid.elements, dtype=torch.float32, device=device)
    numbers = torch.empty(settings.rows * settings.columns, dtype=torch.uint8, device=device)
    control, gains = planner.zeros["control"], planner.doubles[at.SHARES :]

    def advance(what: int, attempt: int) -> None:
        searching.advance[(1,)](
            planner.zeros["row_bins"],
            planner.zeros["column_bins"],
            planner.costs,
            planner.constants.count_bits,
            planner.constants.plans,
            planner.constants.numbers,
            planner.zeros["state"],
            planner.doubles,
            control,
            gains,
            some.counts,
            lanes.counts,
            settings.rows,
            settings.columns,
            settings.plain,
            PLANS,
            MODEL,
            PLANS,
            settings.group_bits,
            settings.grid.groups,
            settings.grid.lanes,
            some_grid.groups,
            some_grid.lanes,
            settings.size,
            settings.too_free,
            attempt,
            settings.enough,
            WHAT=what,
            FAMILIES=FAMILIES,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )

    def classes(count: int, every: int, some: bool) -> None:
        programs = triton.cdiv(count, _CLASS_ROWS), triton.cdiv(settings.columns, _CLASS_COLUMNS)
        writing.classes[programs](
            planner.field,
            planner.row_scales,
            planner.column_scales,
            planner.zeros["state"],
            control,
            planner.constants.count_bits,
            values,
            numbers,
            count,
            settings.rows,
            settings.columns,
            every,
            PLANS,
            SOME=some,
            ROWS=_CLASS_ROWS,
            BLOCK=_CLASS_COLUMNS,
        )

    advance(searching.START, 0)
    classes(some_rows, settings.measured, some=True)
    first = settings.first_family
    some.encode(values, numbers, control, gains, salt=salt, first_family=first)
    for attempt in range(1, settings.attempts + 1):
        advance(searching.MEASURED if attempt == 1 else searching.TRIED, attempt)
        classes(settings.rows, 1, some=False)
        lanes.encode(planner.field, numbers, control, gains, salt=salt, first_family=first)
    advance(searching.LAST, settings.attempts + 1)
    _write(planner, lanes, payload)


def _write(planner: Planner, lanes: Lanes, payload: torch.Tensor) -> None:
    settings, where, state = planner.settings, planner.settings.grid, planner.zeros["state"]
    sections = torch.empty(3 * (at.SECTIONS + 1), dtype=torch.int64, device=planner.x.device)
    starts = torch.empty(where.groups, dtype=torch.int64, device=planner.x.device)
    bins = planner.zeros["row_bins"], planner.zeros["column_bins"]
    slots = MODEL, PLANS
    predicts = bool(settings.kinds)
    writing.finish[(1,)](
        *bins,
        planner.constants.count_bits,
        planner.constants.plans,
        planner.fine,
        state,
        lanes.counts,
        payload,
        sections,
        starts,
        settings.rows,
        settings.columns,
        settings.plain,
        *slots,
        where.groups,
        where.lanes,
        PREDICTS=predicts,
        BLOCK=_BLOCK,
    )
    rank = max((rank for rank, _ in settings.kinds), default=1)
    longest = max(settings.rows, settings.columns) * rank
    writing.write_sections[(triton.cdiv(longest, 8 * _OCTETS), at.SECTIONS)](
        planner.row_scales,
        planner.column_scales,
        *bins,
        planner.constants.count_bits,
        planner.constants.plans,
        planner.directions,
        planner.multiplier,
        planner.row_factors,
        state,
        sections,
        payload,
        settings.rows,
        settings.columns,
        settings.plain,
        *slots,
        PREDICTS=predicts,
        BLOCK=_OCTETS,
    )
    writing.write_groups[(where.groups, _WORD_PROGRAMS)](
        lanes.counts,
        lanes.states,
        lanes.words,
        starts,
        state,
        sections,
        payload,
        where.groups,
        where.lanes,
        where.capacity,
        LANES=32,
        BLOCK=_BLOCK,
    )
