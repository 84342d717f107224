"""A decoder of `trellis-R` in plain Python, element by element, that shares no code but the tables.

It reads the payload bit by bit and computes in float64, rounded to fp32 after every operation; the decoded
tensor must be equal, not close.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.trellis.tables import tables
from wire.codecs.registry import codec
from wire.spec import TensorSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "golden"))

import trellis_write

INPUTS = trellis_write.inputs()


def f32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


class Bits:
    """Reads a buffer bit by bit, lowest first; sections start at whole bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.bit = data, 0

    def take(self, width: int) -> int:
        value = 0
        for index in range(width):
            value |= (self.data[self.bit >> 3] >> (self.bit & 7) & 1) << index
            self.bit += 1
        return value

    def section(self, count: int, width: int) -> list[int]:
        values = [self.take(width) for _ in range(count)]
        self.bit = -(-self.bit // 8) * 8
        return values


def decode(packed: bytes, rows: int, columns: int) -> Iterator[float]:
    """The elements in order, before their dtype's rounding."""
    scale = 2.0 ** struct.unpack("<i", packed[48:52])[0]
    prefix = struct.unpack("<BBHhhBBBBBBhI12x", packed[64:96])
    mode, family, step_code, row_base, column_base, row_bits, column_bits, rank, factor_bits = prefix[:9]
    row_exponent_bits, column_exponent_bits, exponent, used = prefix[9:]
    assert mode == 1
    bits = Bits(packed[96 : 64 + used])
    row = [row_base + value for value in bits.section(rows, row_bits)]
    column = [column_base + value for value in bits.section(columns, column_bits)]
    if rank:
        row_exponent = bits.section(rows, row_exponent_bits)
        column_exponent = bits.section(columns, column_exponent_bits)
        multiplier = bits.section(rank, 8)
        half = 2 ** (factor_bits - 1) - 1
        u = [value - half for value in bits.section(rows * rank, factor_bits)]
        v = [value - half for value in bits.section(columns * rank, factor_bits)]

    while bits.bit % 32:
        assert bits.take(1) == 0

    elements = rows * columns
    lanes = min(32, max(1, elements // 1152))
    groups = -(-elements // (lanes * 2048))
    steps = -(-elements // (groups * lanes))
    groups = -(-elements // (lanes * steps))
    number = [min(max(row[e // columns] + column[e % columns], 0), 103) for e in range(elements)]
    shift = [max((c - 20) // 4, 0) for c in number]
    counts = bits.section(groups, 32)
    states = [bits.section(lanes, 32) for _ in range(groups)]
    words = [iter(bits.section(count, 16)) for count in counts]

    known = tables(family)
    frequency = known.frequency.tolist()
    start = [[sum(line[:s]) for s in range(len(line))] for line in frequency]
    symbol_of = [[s for s, f in enumerate(line) for _ in range(f)] for line in frequency]
    multiple = [0] * elements
    for group in range(groups):
        current, before = [0] * lanes, [0] * lanes
        state = states[group]

        def renew(lane: int, state: list[int] = state, group: int = group) -> None:
            if state[lane] < 2**15:
                state[lane] = state[lane] * 2**16 + next(words[group])

        for t in range(steps):
            first = (group * steps + t) * lanes
            place = range(first, min(first + lanes, elements))
            symbols = []
            for lane, e in enumerate(place):
                line = 2 * (number[e] - 4 * shift[e]) + current[lane]
                slot = state[lane] % 4096
                symbol = symbol_of[line][slot]
                state[lane] = frequency[line][symbol] * (state[lane] // 4096) + slot - start[line][symbol]
                renew(lane)
                symbols.append(symbol)
            low = [0] * len(place)
            for second in (0, 1):
                for lane, e in enumerate(place):
                    width = min(max(shift[e] - 10 * second, 0), 20 if second else 10)
                    if symbols[lane] == 90:
                        width = 13
                    if width:
                        low[lane] += (state[lane] % 2**width) << (
                            second * (13 if symbols[lane] == 90 else 10)
                        )
                        state[lane] //= 2**width
                        renew(lane)
            for lane, e in enumerate(place):
                index = ((symbols[lane] - 44) << shift[e]) + low[lane]
                multiple[e] = 2 * index + current[lane] if symbols[lane] != 90 else low[lane] - 2**25
                current[lane], before[lane] = (multiple[e] >> 1 & 1) ^ before[lane], current[lane]
        assert state == [2**15] * lanes and not list(words[group])

    step = (1024 + step_code % 1024) * 2.0 ** (step_code // 1024 - 19)
    for e in range(elements):
        r, c = divmod(e, columns)
        value = f32(multiple[e] * step)
        if rank:
            total = sum(u[r * rank + k] * multiplier[k] * v[c * rank + k] for k in range(rank))
            value = f32(value + total * 2.0 ** (row_exponent[r] + column_exponent[c] + exponent))
        yield f32(value * scale)


@pytest.mark.parametrize(
    ("which", "rate"),
    [
        ("low-rank", "trellis-4.41"),
        ("outliers", "trellis-3.45"),
        ("outliers", "trellis-9.5"),
        ("peaked", "trellis-2.5"),
        ("row", "trellis-6"),
        ("low-rank-bf16", "trellis-3.45"),
    ],
)
def test_plain_python_decodes_the_same(which: str, rate: str) -> None:
    x = INPUTS[which]
    packed = codec(rate).encode(x)
    decoded = codec(rate).decode(packed, TensorSpec(x.dtype, tuple(x.shape)))
    columns = x.shape[-1]
    values = list(decode(packed.numpy().tobytes(), x.numel() // columns, columns))
    assert torch.equal(torch.tensor(values, dtype=torch.float64).to(x.dtype).view(x.shape), decoded)
