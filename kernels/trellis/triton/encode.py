"""`trellis-R`'s encoder on a GPU, from the tensor to its payload, without a transfer to the host.

Carries out a `Planner`'s decision: encodes some rows to measure their size, then all of them, at as many
steps as `wire.codecs.trellis` tries at most. Attempts that are no longer needed return at once. The sizes of
buffers and the numbers of programs and launches depend only on the shape and the rate, so a call can be
captured in a CUDA graph once a call of the same shape and rate has run.
"""

import torch
import triton

from kernels.common.triton.numbers import RECORD
from kernels.trellis.grid import Grid, trial_grid
from kernels.trellis.settings import Settings
from kernels.trellis.tables import FAMILIES
from kernels.trellis.triton import search as searching
from kernels.trellis.triton import state as at
from kernels.trellis.triton import write as writing
from kernels.trellis.triton.lanes import Lanes
from kernels.trellis.triton.plan import MODEL, PLANS, Planner, Records

# Elements per program; no bit depends on them.
_BLOCK = 1024
_OCTETS = 128
_CLASS_ROWS, _CLASS_COLUMNS = 32, 256
_WORD_PROGRAMS = 8
ROOM = 2 << 30
"""Default limit of the scratch memory of `encode_many`, in bytes."""


def encode(
    x: torch.Tensor, payload: torch.Tensor, settings: Settings, salt: int | None = None
) -> torch.Tensor:
    """Fill uint8 `payload` (16-byte aligned) with the code of x, fp32, bf16 or fp16 `[R, C]`, contiguous.

    The code is zeros for x of zeros, if nothing fits, and if x is not finite. Returns the exponent, int32
    0-d, or `kernels.common.tiles.NON_FINITE`. Never waits.
    """
    payload.zero_()
    return _encode(x, payload, settings, salt, 0, many=False)


def encode_many(
    x: torch.Tensor,
    settings: Settings,
    salt: int | None = None,
    *,
    payload: torch.Tensor,
    record: int,
    room: int = ROOM,
) -> torch.Tensor:
    """Encode every row of x, `[n, C]` contiguous, as `encode` does a tensor `[1, C]`; n is below 2**16.

    Args:
        payload: the first row's, uint8; each further row's begins `record` bytes, a multiple of 128, later.
            Must hold zeros.
        room: bytes of scratch memory to use, unless one row needs more.

    Returns the exponents, int32 `[n]`.
    """
    zeros, others = Planner.buffers(settings, many=True)
    nbytes = Records.nbytes(zeros, {**others, **_further_buffers(settings)})
    at_once = -(-len(x) // max(1, -(-len(x) * nbytes // room)))
    exponents = []
    for first in range(0, len(x), at_once):
        memory = payload.as_strided((payload.numel(),), (1,), payload.storage_offset() + first * record)
        rows = x[first : first + at_once]
        exponents.append(_encode(rows, memory, settings, salt, record // RECORD, many=True))
    return torch.cat(exponents)


def _encode(
    x: torch.Tensor, payload: torch.Tensor, settings: Settings, salt: int | None, record: int, *, many: bool
) -> torch.Tensor:
    """Encode a tensor, or with `many` each row, into payloads of zeros; those of rows are `record` times
    `RECORD` bytes apart. Returns the exponents."""
    planner = Planner(x, settings, _further_buffers(settings), many=many)
    planner.run()
    names = "decisions", "states", "counts", "words"
    some, lanes = (
        Lanes(where, at_once, *(planner.buffer[f"{of} {name}"] for name in names))
        for of, where, at_once in (("some", _some_grid(settings), FAMILIES), ("all", settings.grid, 1))
    )
    _search(planner, some, lanes, salt)
    _write(planner, lanes, payload, record)
    return planner.exponent


def _further_buffers(settings: Settings) -> dict[str, tuple[torch.dtype, int]]:
    """The dtype and number of elements of the buffers of the search and of writing, for each tensor."""
    where, some = settings.grid, _some_grid(settings)
    lanes = {
        "some": Lanes.sizes(some, slots=FAMILIES, at_once=FAMILIES),
        "all": Lanes.sizes(where, slots=2, at_once=1),
    }
    return {f"{of} {name}": size for of, sizes in lanes.items() for name, size in sizes.items()} | {
        "values": (torch.float32, some.elements),
        "numbers": (torch.uint8, settings.rows * settings.columns),
        "sections": (torch.int64, 3 * (at.SECTIONS + 1)),
        "starts": (torch.int64, where.groups),
    }


def _some_grid(settings: Settings) -> Grid:
    return trial_grid(settings.measured_rows * settings.columns)


def _search(planner: Planner, some: Lanes, lanes: Lanes, salt: int | None) -> None:
    """Encode some rows with both families of tables, then all rows, step after step."""
    settings = planner.settings
    some_rows = settings.measured_rows
    values, numbers = planner.buffer["values"], planner.buffer["numbers"]
    some_grid = some.where
    control, gains = planner.buffer["control"], planner.doubles[at.SHARES :]
    many = (planner.count, planner.record) if planner.many else None

    def advance(what: int, attempt: int) -> None:
        searching.advance[(planner.count,)](
            planner.buffer["row_bins"],
            planner.buffer["column_bins"],
            planner.costs,
            planner.constants.count_bits,
            planner.constants.plans,
            planner.constants.numbers,
            planner.buffer["state"],
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
            planner.record,
            WHAT=what,
            FAMILIES=FAMILIES,
            BLOCK=_BLOCK,
            MANY=planner.many,
            enable_fp_fusion=False,
        )

    def classes(count: int, every: int, some: bool) -> None:
        high, wide = (1, _BLOCK) if planner.many else (_CLASS_ROWS, _CLASS_COLUMNS)
        programs = triton.cdiv(count, high), triton.cdiv(settings.columns, wide), planner.count
        writing.classes[programs](
            planner.field,
            planner.row_scales,
            planner.column_scales,
            planner.buffer["state"],
            control,
            planner.constants.count_bits,
            values,
            numbers,
            count,
            settings.rows,
            settings.columns,
            every,
            PLANS,
            planner.record,
            SOME=some,
            ROWS=high,
            BLOCK=wide,
            MANY=planner.many,
            enable_fp_fusion=True,
        )

    advance(searching.START, 0)
    classes(some_rows, settings.measured, some=True)
    first = settings.first_family
    some.encode(values, numbers, control, gains, salt=salt, first_family=first, many=many)
    for attempt in range(1, settings.attempts + 1):
        advance(searching.MEASURED if attempt == 1 else searching.TRIED, attempt)
        classes(settings.rows, 1, some=False)
        lanes.encode(planner.field, numbers, control, gains, salt=salt, first_family=first, many=many)
    advance(searching.LAST, settings.attempts + 1)


def _write(planner: Planner, lanes: Lanes, payload: torch.Tensor, record: int) -> None:
    """Write the best codes into payloads; those of many rows are `record` times `RECORD` bytes apart."""
    settings, where, state = planner.settings, planner.settings.grid, planner.buffer["state"]
    sections, starts = planner.buffer["sections"], planner.buffer["starts"]
    records = {"record": planner.record, "packed": record, "MANY": planner.many}
    bins = planner.buffer["row_bins"], planner.buffer["column_bins"]
    slots = MODEL, PLANS
    predicts = bool(settings.kinds)
    writing.finish[(planner.count,)](
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
        **records,
        enable_fp_fusion=True,
    )
    rank = max((rank for rank, _ in settings.kinds), default=1)
    longest = max(settings.rows, settings.columns) * rank
    writing.write_sections[(triton.cdiv(longest, 8 * _OCTETS), at.SECTIONS, planner.count)](
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
        **records,
        enable_fp_fusion=True,
    )
    writing.write_groups[(where.groups, _WORD_PROGRAMS, planner.count)](
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
        **records,
        enable_fp_fusion=True,
    )
