"""`trellis-R`: R bits per element, at any rate from 2 to 10. At the rate of `tah` it has a third of its
error.

It combines low-rank prediction, trellis-coded quantization with one step size, and range coding (see
`kernels.trellis.reference`). The byte budget follows only from shape and rate. The encoder searches for
nearly the smallest step size whose code fits; unused bytes are zero.

On a GPU with Triton, `kernels.trellis.triton.encode` makes the same decisions on the device, so the host
sees no values and never waits to encode. Decoding waits twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common import dispatch
from kernels.common.tiles import MAX_EXPONENT, MIN_EXPONENT, NON_FINITE
from kernels.trellis import lanes as trellis_lanes
from kernels.trellis import ops as trellis_ops
from kernels.trellis import reference as trellis
from kernels.trellis.factors import Factors, Space, fitted, left_scales, most_multipliers, spaces
from kernels.trellis.grid import Grid, grid, trial_grid
from kernels.trellis.loops import matrices as matrix_loops
from kernels.trellis.reference import Scales
from kernels.trellis.scales import scales
from kernels.trellis.settings import LANE_BITS, Settings
from kernels.trellis.tables import DITHERED, FAMILIES
from wire.codecs import trellis_payload
from wire.codecs.base import Codec
from wire.codecs.formats import HEADER_BYTES, DitherFormat
from wire.codecs.header import Header
from wire.codecs.trellis_payload import Payload, Plain, Widths, group_bytes

# (rank, bits) of the predictions to try, and the most rows to try them on.
_PREDICTIONS = ((8, 4), (32, 4), (32, 6))
_TRIED_ROWS = 512
# With this many rows or columns, the scales of the other side are always worth their bits.
_MANY = 128
# How many rows to code to estimate the cost. A tensor with fewer than `_FEW` elements is coded whole.
_MEASURED_ROWS = 128
_FEW = 1 << 17
# Fractions of the budget. `_FREE` stays free because costs are estimates (twice that at first). A result that
# leaves more than `_TOO_FREE` is improved.
_FREE = 1 / 800
_TOO_FREE = 1 / 200
# How many steps to try: for small tensors, for others, and as long as none has fitted.
_ATTEMPTS = 6
_FEW_ATTEMPTS = 2
_MAX_ATTEMPTS = 14

Int32Array = NDArray[np.int32]


class TrellisCodec(Codec):
    """Meets a rate in bits per element, header included, for tensors of a few thousand elements or more."""

    exponents = range(MIN_EXPONENT, MAX_EXPONENT + 1)

    _salt: int | None = None
    """The seed of the dither; None for no dither."""

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        if dispatch.has_kernels(tensor.device, "trellis"):
            from kernels.trellis.triton import encode as triton_trellis_encode

            rows, columns = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
            x = tensor.reshape(rows, columns).contiguous()
            return triton_trellis_encode.encode(
                x, payload, settings(rows, columns, payload.numel(), self._salt), self._salt
            )
        # The CPU packs what is on a GPU without kernels.
        host = torch.zeros(payload.shape, dtype=torch.uint8) if payload.device.type != "cpu" else payload
        exponent, y = matrix_loops.normalised(tensor.reshape(-1, tensor.shape[-1]).cpu())
        if exponent.item() == NON_FINITE:
            host.zero_()
        else:
            _encode(y, host, self._salt)
        if host is not payload:
            payload.copy_(host)
        return exponent

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        if out.device.type != "cpu" and not dispatch.has_kernels(out.device, "trellis"):
            host = torch.empty(out.shape, dtype=out.dtype)
            self._unpack(payload.cpu(), host, exponent)
            out.copy_(host)
            return
        columns = out.shape[-1]
        first = first_family(self._salt)
        decoded = trellis_payload.read(payload, out.numel() // columns, columns, first)
        if decoded is None:
            out.zero_()
            return
        trellis_ops.restore(decoded.n, decoded.step_code, decoded.factors, exponent, out, self._salt)

    def _pack_rows(self, x: torch.Tensor, records: torch.Tensor, size: int) -> torch.Tensor:
        if not dispatch.has_kernels(x.device, "trellis"):
            return super()._pack_rows(x, records, size)
        from kernels.trellis.triton import encode as triton_trellis_encode

        records[:, HEADER_BYTES:size].zero_()
        return triton_trellis_encode.encode_many(
            x,
            settings(1, x.shape[1], size - HEADER_BYTES, self._salt),
            self._salt,
            payload=records[0, HEADER_BYTES:size],
            record=records.shape[1],
        )

    def _unpack_rows(
        self,
        records: torch.Tensor,
        out: torch.Tensor,
        headers: Sequence[Header],
        host: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if host is None or not dispatch.has_kernels(out.device, "trellis"):
            super()._unpack_rows(records, out, headers, host)
            return
        where, size = grid(out.shape[1]), self.packed_bytes(headers[0].spec)
        read = [trellis_payload.read_plain(record.numpy()[HEADER_BYTES:], where) for record in host]
        nothing = Plain(0, 0, 0, np.zeros(where.groups, dtype=np.int64))
        filled = [nothing if plain is None else plain for plain in read]
        complete = self._decode_rows(records, out, headers, filled, where).tolist()
        for number, (plain, is_complete) in enumerate(zip(read, complete, strict=True)):
            if plain is None or not is_complete:
                # Decode it alone, which also reports what is wrong.
                self.unpack(records[number, :size], headers[number].spec, headers[number], out[number])

    def _decode_rows(
        self,
        records: torch.Tensor,
        out: torch.Tensor,
        headers: Sequence[Header],
        plain: Sequence[Plain],
        where: Grid,
    ) -> torch.Tensor:
        """Decode with the GPU kernels. Returns whether each row is complete, bool `[n]`."""
        from kernels.trellis.triton import decode as triton_trellis_decode

        fields = np.array(
            [
                (row.number, row.family, row.step_code, header.exponent, *row.counts)
                for row, header in zip(plain, headers, strict=True)
            ]
        )
        on_device = torch.from_numpy(fields).to(out.device)
        states = HEADER_BYTES + trellis_payload.PREFIX_BYTES + 4 * where.groups
        words = states + 4 * where.groups * where.lanes
        end = self.packed_bytes(headers[0].spec)
        end -= (end - words) % 2
        first = records[0]
        return triton_trellis_decode.decode_many(
            on_device[:, :4].contiguous(),
            on_device[:, 4:].contiguous(),
            first[states:words].view(torch.int32),
            first[words:end].view(torch.int16),
            out,
            where,
            first_family=first_family(self._salt),
            record=records.shape[1],
            total=(end - words) // 2,
            salt=self._salt,
        )


class DitherCodec(TrellisCodec):
    """`dither-R`: `trellis-R` whose error has zero mean for every tensor (`kernels.trellis.loops.dither`).

    `salted` returns the codec for one tensor, whose salt both ends know. The registry's codec has salt 0.
    """

    draws = True

    def __init__(self, known: DitherFormat, salt: int = 0) -> None:
        super().__init__(known)
        self._salt = salt

    def salted(self, salt: int) -> Codec:
        return DitherCodec(DitherFormat(self.parameters.share / 1000), salt)


def first_family(salt: int | None) -> int:
    """The first family of tables for elements with dither (if there is a salt) or without it."""
    return 0 if salt is None else DITHERED


def settings(rows: int, columns: int, size: int, salt: int | None = None) -> Settings:
    """Settings that make `kernels.trellis.triton.encode` encode into `size` bytes as this module does."""
    every = _every(rows)
    return Settings(
        rows=rows,
        columns=columns,
        size=size,
        every=every,
        measured=_measured(rows, columns),
        shared_scales=min(rows, columns) < _MANY,
        kinds=_kinds(rows, columns, -(-rows // every), 8 * size),
        attempts=_MAX_ATTEMPTS,
        enough=_enough(rows * columns),
        free=_FREE,
        too_free=int(size * _TOO_FREE),
        first_family=first_family(salt),
    )


def _every(rows: int) -> int:
    """Plans are tried on one row in this many."""
    return -(-rows // _TRIED_ROWS)


def _measured(rows: int, columns: int) -> int:
    """One row in this many is coded to estimate the cost."""
    return 1 if rows * columns < _FEW else -(-rows // _MEASURED_ROWS)


def _kinds(rows: int, columns: int, sample_rows: int, budget: int) -> tuple[tuple[int, int], ...]:
    """(rank, bits) of the predictions to try."""
    return tuple(
        (rank, bits)
        for rank, bits in _PREDICTIONS
        if 4 * rank <= min(sample_rows, columns) and rank * bits * (rows + columns) * 2 <= budget
    )


def _enough(elements: int) -> int:
    """The number of attempts if one has fitted."""
    return _ATTEMPTS if elements < _FEW else _FEW_ATTEMPTS


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to model a tensor: a prediction, and whether scales differ by row and by column."""

    space: Space | None = None
    by_row: bool = True
    by_column: bool = True


@dataclass(frozen=True, slots=True)
class _Model:
    """The residual of a matrix after prediction, and the residual's scales."""

    factors: Factors | None
    residual: torch.Tensor  # [R, C]
    scales: Scales
    # The largest row and column exponents.
    exponents: tuple[int, int]

    def widths(self, row: int, column: int) -> Widths:
        """The bits of each section if classes take `row` and `column` bits."""
        if self.factors is None:
            return Widths(row, column)
        return Widths(
            row,
            column,
            self.factors.rank,
            self.factors.bits,
            *(top.bit_length() for top in self.exponents),
        )

    def fixed_bits(self, row: int, column: int) -> int:
        """Bits of everything but the code words, if classes take `row` and `column` bits."""
        return _fixed_bits(self.widths(row, column), *self.residual.shape)


def _fixed_bits(widths: Widths, rows: int, columns: int) -> int:
    where = grid(rows * columns)
    return 8 * widths.side_bytes(rows, columns) + where.groups * (32 + where.lanes * LANE_BITS)


def _encode(y: torch.Tensor, payload: torch.Tensor, salt: int | None = None) -> None:
    """Fill `payload` with the best code of fp32 `[R, C]`, below 2**13 in magnitude.

    Writes zeros for a tensor of zeros, or if nothing else fits.
    """
    budget = 8 * payload.numel()
    plan = _best_plan(y, budget, first_family(salt))
    model = None if plan is None else _model(y, plan)
    if model is None or not _fill(model, payload, salt):
        payload.zero_()  # a tensor of zeros


def _fill(model: _Model, payload: torch.Tensor, salt: int | None) -> bool:
    """Fill the payload with the code of the smallest step that fits. Returns False if none does."""
    size = payload.numel()
    budget = 8 * size
    elements = model.residual.numel()
    where = grid(elements)
    family, share = _measure(model, budget, salt)
    enough = _enough(elements)
    fits = False
    free = 2 * _FREE
    # The largest step code known to be too small, and the smallest known to fit.
    low, high = -1, trellis.STEP_CODES
    flat = model.residual.view(-1)
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        code = _smallest_step(model.scales, budget * (1 - free), family, share, model.fixed_bits)
        code = min(max(code, low + 1), high - 1)
        row, column = model.scales.classes(code)
        number = _classes(row, column)
        coded = trellis_lanes.encode(flat, number, trellis.gain(code), where, family, salt)
        words = int(coded.counts.sum())
        share = (16 * words + 8 * where.groups * where.lanes) / max(model.scales.cost(code, family), 1.0)
        widths = model.widths(*model.scales.class_bits(code))
        whole = Payload(family - first_family(salt), code, row, column, model.factors, widths)
        left = size - whole.side_bytes - group_bytes(where, words)
        if left >= 0:
            trellis_payload.write(whole, coded, where, words, payload)
            fits, high, free = True, code, _FREE * 1.5
        else:
            # The size of the code words is now known for a nearby step.
            low, free = code, _FREE * 2 ** (attempt - 1)
        if (fits and (left in range(int(size * _TOO_FREE) + 1) or attempt >= enough)) or high - low <= 1:
            break
    return fits


def _smallest_step(
    of: Scales, bits: float, family: int, share: float, fixed_bits: Callable[[int, int], int]
) -> int:
    """Code of the smallest step expected to fit in `bits`; the largest if none does.

    Args:
        share: the actual size of the code words over the expected one.
        fixed_bits: bits of everything but the code words, from the bits of row and column classes.
    """
    low, high = 0, trellis.STEP_CODES - 1
    fixed_bits = cache(fixed_bits)
    while low < high:
        middle = (low + high) // 2
        if fixed_bits(*of.class_bits(middle)) + share * of.cost(middle, family) <= bits:
            high = middle
        else:
            low = middle + 1
    return low


def _best_plan(y: torch.Tensor, budget: int, family: int) -> _Plan | None:
    """The plan with the smallest step that fits the budget, tried on some rows; None if they are zeros."""
    rows, columns = y.shape
    sample = _rows(y, _every(rows))
    plans, own = [_Plan()], scales(sample)
    if min(rows, columns) < _MANY:
        # Scales of the long side may cost more than they save.
        plans += [_Plan(None, *sides) for sides in ((True, False), (False, True), (False, False))]
    kinds = _kinds(rows, columns, len(sample), budget)
    if kinds:
        plans += [_Plan(space) for space in spaces(sample, max(rank for rank, _ in kinds), list(kinds), own)]
    best: tuple[int, _Plan] | None = None
    for plan in plans:
        if plan.space is not None:
            row, column = left_scales(sample, plan.space.sample)
        elif plan.by_row and plan.by_column:
            row, column = own
        else:
            row, column = scales(sample, by_row=plan.by_row, by_column=plan.by_column)
        of = Scales.of(row.numpy(), column.numpy())
        fixed_bits = partial(_expected_bits, plan, rows, columns)
        code = _smallest_step(of, budget, family, rows / len(sample), fixed_bits)
        if best is None or code < best[0]:
            best = code, plan
    return None if best is None else best[1]


def _expected_bits(plan: _Plan, rows: int, columns: int, row: int, column: int) -> int:
    """`_Model.fixed_bits` of the plan for a matrix, estimated from a sample."""
    widths = Widths(row, column)
    if plan.space is not None:
        # Exponents usually span a few octaves.
        widths = Widths(row, column, plan.space.multiplier.size, plan.space.bits, 2, 3)
    return _fixed_bits(widths, rows, columns)


def _model(y: torch.Tensor, plan: _Plan) -> _Model | None:
    """Apply the plan to all rows; None for zeros."""
    if plan.space is not None:
        fit = fitted(y, plan.space)
        factors, residual, row, column = fit.factors, fit.residual, fit.row, fit.column
        tops, largest = factors.tops.tolist(), fit.peak
    else:
        factors, residual, tops = None, y, [0, 0, 0]
        row, column = scales(y, by_row=plan.by_row, by_column=plan.by_column)
        largest = matrix_loops.peak(y)
    exponents, multipliers, peak = (tops[0], tops[1]), tops[2], float(largest)
    if factors is None and peak == 0:
        return None
    if factors is not None and not (
        peak <= 1 << 14
        and trellis_payload.predictable(*exponents, factors.exponent)
        and multipliers <= most_multipliers(factors.bits)
    ):
        return _model(y, _Plan())
    return _Model(factors, residual, Scales.of(row.numpy(), column.numpy()), exponents)


def _measure(model: _Model, budget: int, salt: int | None) -> tuple[int, float]:
    """The family of tables that codes some rows in the fewest bits, and its actual over its expected size."""
    every = _measured(*model.residual.shape)
    some = Scales(model.scales.row[::every], model.scales.column)
    sample = _rows(model.residual, every).view(-1)
    where = trial_grid(sample.numel())
    first = first_family(salt)
    code = _smallest_step(model.scales, budget * (1 - _FREE), first, 1.0, model.fixed_bits)
    number = _classes(*some.classes(code))
    best: tuple[int, int, float] | None = None
    for family in range(first, first + FAMILIES):
        coded = trellis_lanes.encode(sample, number, trellis.gain(code), where, family, salt)
        words = int(coded.counts.sum())
        share = (16 * words + 8 * where.groups * where.lanes) / max(some.cost(code, family), 1.0)
        step = _smallest_step(model.scales, budget * (1 - _FREE), family, share, model.fixed_bits)
        if best is None or step < best[0]:
            best = step, family, share
    assert best is not None
    return best[1:]


def _rows(x: torch.Tensor, every: int) -> torch.Tensor:
    """Every `every`-th row."""
    # Torch's copy would wake its threads, which then keep cores busy.
    return torch.from_numpy(np.ascontiguousarray(x.numpy()[::every]))


def _classes(row: Int32Array, column: Int32Array) -> torch.Tensor:
    return trellis.classes(torch.from_numpy(row), torch.from_numpy(column))
