"""`trellis-R`: R bits an element, from 2 to 10 and anything between; a third of `tah`'s error at its bits.

Low-rank prediction, trellis-coded quantization with one step, range coding: `kernels.trellis`. The step is
nearly the smallest whose code fits the tensor's bytes, which follow from shape and rate alone; what is left
over is zero.

It is computed in numpy on the host; a tensor on a GPU is copied there and back.
"""

import math
import re
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import trellis
from kernels.tiles import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    NON_FINITE,
    multiply_all,
    normalised,
    powers_of_two,
    tensor_exponent,
)
from kernels.trellis_factors import Factors, fit, predict
from kernels.trellis_lanes import StreamError
from kernels.trellis_scales import scales
from kernels.trellis_tables import COST_BITS, FAMILIES, tables
from wire.codecs import trellis_payload
from wire.codecs.base import Codec
from wire.codecs.header import HEADER_BYTES, Parameters
from wire.codecs.trellis_payload import MAX_CLASS_STEP, Payload
from wire.errors import ConfigError, PackedMismatchError
from wire.spec import TensorSpec

PREFIX = "trellis-"
MIN_RATE = 2.0
MAX_RATE = 10.0
RANGE = f"{PREFIX}{MIN_RATE:g} to {PREFIX}{MAX_RATE:g}"

_NAME = re.compile(r"trellis-(\d{1,2}(?:\.\d{1,3})?)", re.ASCII)
_RATE_UNIT = 1000
# A tensor of fewer elements gets its header, and as much again for the fixed parts, on top of its rate.
_SMALL = 4096
# Rank and bits of the predictions that are tried; more than 4 bits only where the one before gains much.
_PREDICTIONS = ((8, 4), (8, 6), (32, 4), (32, 6))
_MUCH = 1.2
# Rows or columns of which no doubt the others' scales are worth their bits.
_MANY = 128
# Rows that a step's cost is measured on before a path is searched.
_SAMPLED_ROWS = 8
# A lane's state takes 31 bits and saves 8 of its words' on average.
_LANE_BITS = 24
# Shares of the budget: left free at first, because a cost is an estimate; and too much to leave free in the
# end.
_FREE = 1 / 800
_TOO_FREE = 1 / 200
# From 2**-16 octaves to 16ths.
_SIXTEENTH = COST_BITS - 4
# Steps that are tried: of small tensors, of others; and if none has fitted yet.
_CHEAP = 1 << 17
_ATTEMPTS = 6
_FEW_ATTEMPTS = 2
_MAX_ATTEMPTS = 14

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]


class TrellisCodec(Codec):
    """Meets a rate in bits an element, header included, for tensors of a few thousand elements or more."""

    exponents = range(MIN_EXPONENT, MAX_EXPONENT + 1)

    def __init__(self, rate: float) -> None:
        thousandths = round(rate * _RATE_UNIT) if math.isfinite(rate) else 0
        if not MIN_RATE * _RATE_UNIT <= thousandths <= MAX_RATE * _RATE_UNIT:
            raise ConfigError(f"{PREFIX}{rate:g} is no codec: {RANGE} are")
        self.name = f"{PREFIX}{thousandths / _RATE_UNIT:g}"
        self.parameters = Parameters(codec=6, bits=0, share=thousandths)

    def _payload_bytes(self, spec: TensorSpec) -> int:
        rate = self.parameters.share
        at_rate = rate * spec.elements // (8 * _RATE_UNIT)
        small = min(at_rate, rate * _SMALL // (8 * _RATE_UNIT)) + HEADER_BYTES
        return max(at_rate - HEADER_BYTES, small)

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        exponent = tensor_exponent(tensor).cpu()
        data = np.zeros(payload.numel(), dtype=np.uint8)
        if exponent.item() != NON_FINITE:
            host = tensor.cpu()
            y = normalised(host.reshape(-1, tensor.shape[-1]), powers_of_two(-exponent))
            data = trellis_payload.write(_encode(y.numpy(), payload.numel()), payload.numel())
        payload.copy_(torch.from_numpy(data))
        return exponent

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        columns = out.shape[-1]
        data = payload.cpu().numpy()
        values = _decode(data, out.numel() // columns, columns)
        y = multiply_all(torch.from_numpy(values), powers_of_two(torch.tensor(exponent, dtype=torch.int32)))
        limit = torch.finfo(out.dtype).max
        out.copy_(y.clamp_(-limit, limit).view(out.shape))


def named(name: str) -> TrellisCodec | None:
    """The codec of a name such as `trellis-4.41`, with at most three decimals; None for other names."""
    match = _NAME.fullmatch(name)
    return TrellisCodec(float(match[1])) if match else None


@dataclass(frozen=True, slots=True)
class _Model:
    """A prediction, what it leaves, and the scales of that."""

    factors: Factors | None
    residual: Float32Array  # [R, C]
    row: Int32Array
    column: Int32Array
    costs: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def octaves(self) -> float:
        """Mean logarithm of the magnitude of what is left; it saves as many bits an element as it falls."""
        return (int(self.row.sum()) / self.row.size + int(self.column.sum()) / self.column.size) / 16

    def classes(self, step: int) -> tuple[Int32Array, Int32Array]:
        """Row and column classes for a step, of which the logarithm is given in 16ths."""
        row = trellis.quarters(self.row, trellis.class_offset(step), MAX_CLASS_STEP)
        return row, trellis.quarters(self.column, 0, MAX_CLASS_STEP)

    def fixed_bits(self, step: int) -> int:
        """Bits beside the symbols'."""
        where = trellis.grid(self.residual.size)
        lanes = where.blocks * (32 + where.lanes * _LANE_BITS)
        return 8 * trellis_payload.side_bytes(*self.classes(step), self.factors) + lanes

    def cost(self, code: int, family: int) -> float:
        """Bits of the symbols by their classes. Between 16ths of an octave they change with the step."""
        exact = trellis.step_logarithm(code)
        below = exact >> _SIXTEENTH
        share = (exact - (below << _SIXTEENTH)) / (1 << _SIXTEENTH)
        return self._cost(below, family) * (1 - share) + self._cost(below + 1, family) * share

    def smallest_step(self, bits: float, family: int, share: float) -> int:
        """The smallest step's code that does with `bits`, if symbols take `share` of what is expected.

        The largest if none does.
        """
        low, high = 0, trellis.STEP_CODES - 1
        while low < high:
            middle = (low + high) // 2
            if self.fixed_bits(sixteenths(middle)) + share * self.cost(middle, family) <= bits:
                high = middle
            else:
                low = middle + 1
        return low

    def _cost(self, step: int, family: int) -> float:
        known = self.costs.get((step, family))
        if known is None:
            counts = trellis.class_counts(*self.classes(step))
            known = int((counts * tables(family).mean_cost).sum()) / (1 << COST_BITS)
            self.costs[step, family] = known
        return known


def sixteenths(code: int) -> int:
    """The logarithm of a code's step in 16ths of an octave, rounded."""
    return (trellis.step_logarithm(code) + (1 << _SIXTEENTH >> 1)) >> _SIXTEENTH


def _encode(y: Float32Array, size: int) -> Payload | None:
    """The best payload of at most `size` bytes; None for zeros, sent or all that there is room for."""
    if not y.any():
        return None
    budget = 8 * size
    model = _best_model(y, budget)
    family, share = _measure(model, budget)
    where = trellis.grid(y.size)
    flat = model.residual.reshape(-1)
    enough = _ATTEMPTS if y.size < _CHEAP else _FEW_ATTEMPTS
    best: Payload | None = None
    free = _FREE
    # Codes of steps that are known to be too small, and to do.
    low, high = -1, trellis.STEP_CODES
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        code = model.smallest_step(budget * (1 - free), family, share)
        code = min(max(code, low + 1), high - 1)
        row, column = model.classes(sixteenths(code))
        indices = trellis.quantize(flat, trellis.classes(row, column), trellis.step_of(code), where, family)
        cost = indices.cost / (1 << COST_BITS) + sum(plane.size for plane in indices.low_bits)
        share = cost / max(model.cost(code, family), 1.0)
        left = -1
        if model.fixed_bits(sixteenths(code)) + cost <= budget:
            blocks = trellis.code(indices, family)
            payload = Payload(
                family, code, row, column, model.factors, indices.low_bits, indices.escapes, blocks
            )
            left = size - trellis_payload.used_bytes(payload)
        if left >= 0:
            best, high, free = payload, code, _FREE * 1.5
        else:
            low, free = code, free * 2
        if best is not None and (left in range(int(size * _TOO_FREE) + 1) or attempt >= enough):
            break
        if high - low <= 1:
            break
    return best


def _best_model(y: Float32Array, budget: int) -> _Model:
    """The prediction with which the smallest step fits the budget."""
    plain = _Model(None, y, *scales(y))
    best, best_code = plain, plain.smallest_step(budget, 0, 1.0)
    if min(y.shape) < _MANY:
        # Then the other side's scales cost much and tell little.
        for by_row, by_column in ((True, False), (False, True), (False, False)):
            model = _Model(None, y, *scales(y, by_row=by_row, by_column=by_column))
            code = model.smallest_step(budget, 0, 1.0)
            if code < best_code:
                best, best_code = model, code
    before = plain.octaves
    for rank, bits in _PREDICTIONS:
        rows, columns = y.shape
        if 4 * rank > min(rows, columns) or rank * bits * (rows + columns) * 2 > budget:
            continue
        if bits > 4 and plain.octaves - before < _MUCH:
            continue
        factors = fit(y, rank, bits)
        if not trellis_payload.predictable(factors):
            continue
        residual = y - predict(factors)
        if np.abs(residual).max() >= 1 << 14:
            continue
        model = _Model(factors, residual, *scales(residual))
        before = model.octaves
        code = model.smallest_step(budget, 0, 1.0)
        if code < best_code:
            best, best_code = model, code
    return best


def _measure(model: _Model, budget: int) -> tuple[int, float]:
    """The family of tables that codes some rows in the fewest bits, and the share of the expected cost."""
    rows = slice(None, None, _SAMPLED_ROWS)
    sample = _Model(None, model.residual[rows], model.row[rows], model.column)
    family, share = 0, 1.0
    # The share depends a little on the step, so it is measured again at the step that it leads to.
    for _ in range(2):
        code = model.smallest_step(budget * (1 - _FREE), family, share)
        number = trellis.classes(*sample.classes(sixteenths(code)))
        step = trellis.step_of(code)
        costs = [trellis.sampled_cost(sample.residual, number, step, family) for family in range(FAMILIES)]
        family = int(np.argmin(costs))
        share = costs[family] / (1 << COST_BITS) / max(sample.cost(code, family), 1.0)
    return family, share


def _decode(data: NDArray[np.uint8], rows: int, columns: int) -> Float32Array:
    """The normalised tensor, `[rows * columns]`."""
    parsed = trellis_payload.read(data, rows, columns)
    if parsed is None:
        return np.zeros(rows * columns, dtype=np.float32)
    payload, number = parsed
    try:
        n = trellis.decode(
            payload.blocks,
            number,
            payload.low_bits,
            payload.escapes,
            trellis.grid(rows * columns),
            payload.family,
        )
    except StreamError as error:
        raise PackedMismatchError(f"a packed trellis tensor has a wrong code ({error}): refused") from None
    return trellis.reconstruct(n, trellis.step_of(payload.step_code), payload.factors)
