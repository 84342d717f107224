"""`tah` and `fixed-b` against plain Python, one element at a time, that shares no code with the kernels.

Every step is a float64 operation rounded to fp32. Float64 has more than twice fp32's digits, so that is the
correctly rounded fp32 operation, and the packed bytes must be equal, not close.
"""

import math
import struct
from fractions import Fraction

import google_crc32c
import pytest
import torch

from kernels.tah.reference import entropy_bits
from tests.support.cases import each
from wire.codecs.registry import codec
from wire.spec import TensorSpec

LOG2 = (0.44191703, -0.2671794, 0.1484266, -0.04514902)


def f32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def half_at_least(x: float) -> float:
    """The smallest fp16 >= x."""
    bits = struct.unpack("<H", struct.pack("<e", x))[0]
    half = struct.unpack("<e", struct.pack("<e", x))[0]
    if half < x:
        bits += -1 if bits & 0x8000 else 1
        half = struct.unpack("<e", struct.pack("<H", bits))[0]
    return float(half) + 0.0  # never -0.0


def log2(n: float) -> float:
    """The approximation with fp32's roundings."""
    mantissa, exponent = math.frexp(n)
    value = f32((exponent - 1 + 127) * 2**23 + (2 * mantissa - 1) * 2**23) / 2**23 - 127
    f = value - math.floor(value)
    c0, c1, c2, c3 = (f32(c) for c in LOG2)
    p = f32(f32(f * c3) + c2)
    p = f32(f32(p * f) + c1)
    p = f32(f32(p * f) + c0)
    return f32(value + f32(p * f32((1 - f) * f)))


def entropy(tile: list[float]) -> int:
    largest = max(map(abs, tile))
    if largest == 0:
        return 0
    k = max(math.frexp(largest)[1] - 1, -63)
    n = [round(abs(y) * 2.0 ** (13 - k)) for y in tile]
    total = sum(n)
    if total == 0:
        return 0
    weighted = sum(round(f32(v * log2(v))) for v in n if v)
    return max(0, round(f32(f32(log2(total) - f32(weighted / total)) * 2**20)))


def hadamard(y: list[float]) -> list[float]:
    y = list(y)
    h = 1
    while h < 64:
        for i in range(64):
            if not i & h:
                y[i], y[i + h] = f32(y[i] + y[i + h]), f32(y[i] - y[i + h])
        h *= 2
    return [f32(v / 8) for v in y]


def tiles_of(x: torch.Tensor) -> tuple[list[list[float]], list[int], int]:
    """Normalised tiles filled up with zeros, how many elements of each are real, and the exponent."""
    flat = [row.double().tolist() for row in x.reshape(-1, x.shape[-1])]
    exponent = math.frexp(max(abs(v) for row in flat for v in row))[1] - 13
    tiles, real = [], []
    for row in flat:
        scaled = [f32(math.ldexp(v, -exponent)) for v in row]
        for start in range(0, len(row), 64):
            tile = scaled[start : start + 64]
            real.append(len(tile))
            tiles.append(tile + [0.0] * (64 - len(tile)))
    return tiles, real, exponent


def pack_codes(codes: list[list[int]], bit: int) -> bytes:
    words = (sum((q >> bit & 1) << i for i, q in enumerate(tile)) for tile in codes)
    return b"".join(word.to_bytes(8, "little") for word in words)


def packed(
    x: torch.Tensor, number: int, bits: int, share: int, tau: float, c: float, e: int, *sections: bytes
) -> bytes:
    payload = b"".join(section + bytes(-len(section) % 16) for section in sections)
    dtype = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[x.dtype]
    head = b"TWPT" + bytes((1, number, bits, 64, dtype, x.dim())) + struct.pack("<Hff", share, tau, c)
    head += b"".join(n.to_bytes(4, "little") for n in (*x.shape, 0, 0, 0, 0)[:5])
    head += struct.pack("<Qi", len(payload), e) + bytes(8)
    checksum: int = google_crc32c.value(head + payload)
    return head + checksum.to_bytes(4, "little") + payload


def reference_tah(x: torch.Tensor) -> tuple[bytes, list[float]]:
    """The packed bytes, and the decoded values before the exponent and the output dtype."""
    tiles, real, exponent = tiles_of(x)
    samples = x.shape[0] if x.dim() >= 3 else 1
    each = len(tiles) // samples
    four = [False] * len(tiles)
    for start in range(0, len(tiles), each):
        ranked = sorted(range(start, start + each), key=lambda t: (-entropy(tiles[t]), t))
        for t in ranked[: round(Fraction(4, 5) * each)]:
            four[t] = True
    scales, zeros, pivots, codes, decoded = [], [], [], [], []
    for t, tile in enumerate(tiles):
        order = sorted(range(64), key=lambda i: -abs(tile[i]))
        first, second = abs(tile[order[0]]), abs(tile[order[1]])
        outlier = Fraction(first) > 2 * (Fraction(second) + Fraction(1, 2**24))
        pivot = order[0] if outlier else 0
        y = list(tile)
        if outlier:
            y[0], y[pivot] = y[pivot], y[0]
            y = hadamard(y)
        count = 64 if outlier else real[t]
        steps = 15 if four[t] else 7
        low = min(y[:count])
        zero = -half_at_least(-low) + 0.0 if abs(low) >= 2.0**-100 else 0.0
        step = half_at_least(max(f32(f32(max(y[:count]) - zero) / steps), 2.0**-24))
        inverse = f32(1 / step)
        q = [round(f32(f32(v - zero) * inverse)) for v in y[:count]] + [0] * (64 - count)
        assert all(0 <= v <= steps for v in q)
        back = [f32(v * step + zero) for v in q]
        if outlier:
            back = hadamard(back)
            back[0], back[pivot] = back[pivot], back[0]
        scales.append(-step if outlier else step)
        zeros.append(zero)
        pivots.append(pivot)
        codes.append(q)
        decoded += back[: real[t]]
    bit_map = sum(1 << i for i, flag in enumerate(four) if flag).to_bytes(-(-len(tiles) // 8), "little")
    sextets = sum(p << 6 * i for i, p in enumerate(pivots)).to_bytes(-(-len(tiles) * 6 // 8), "little")
    return (
        packed(
            x,
            *(5, 4, 8000, 2.0, 0.0, exponent),
            struct.pack(f"<{len(tiles)}e", *scales),
            struct.pack(f"<{len(tiles)}e", *zeros),
            bit_map,
            sextets,
            b"".join(pack_codes(codes, bit) for bit in range(3)),
            pack_codes([q for q, flag in zip(codes, four, strict=True) if flag], 3),
        ),
        [math.ldexp(v, exponent) for v in decoded],
    )


def reference_fixed(x: torch.Tensor, bits: int) -> tuple[bytes, list[float]]:
    tiles, real, exponent = tiles_of(x)
    limit = 2 ** (bits - 1) - 1
    scales, codes, decoded = [], [], []
    for tile, count in zip(tiles, real, strict=True):
        step = half_at_least(max(f32(max(map(abs, tile)) / limit), 2.0**-24))
        q = [round(f32(v * f32(1 / step))) for v in tile[:count]]
        assert all(abs(v) <= limit for v in q)
        scales.append(step)
        codes.append([v + limit for v in q] + [0] * (64 - count))
        decoded += [v * step for v in q]
    return (
        packed(
            x,
            *(4, bits, 0, 0.0, 1.0, exponent),
            struct.pack(f"<{len(tiles)}e", *scales),
            b"".join(pack_codes(codes, bit) for bit in range(bits)),
        ),
        [math.ldexp(v, exponent) for v in decoded],
    )


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    spiky = normal(2, 6, 192)
    spiky[:, :, 5] *= 40
    spiky[0, 0, :64] = 0
    spiky[0, 1, 64:128] = 1.5
    cubed = normal(3, 4, 100) ** 3
    shifted = normal(2, 200) + 1000
    # Of 4096, in turn: just no outlier, one, and one of either sign.
    near = normal(4, 64).clamp(-1, 1)
    near[:, 20] = torch.tensor([4096.0, 4096.0, -4096.0, 4096.0])
    near[:, 50] = torch.tensor([2048.0, 2047.0, 2047.0, -2047.0])
    return {
        "spikes": spiky,
        "odd widths": cubed,
        "far from zero": shifted,
        "gradient": normal(2, 3, 128) * 1e-5,
        "tiny": normal(1, 2, 130) * 1e-38,
        "huge": normal(4, 65) * 1e37,
        "mixed": normal(2, 5, 64) * torch.tensor([1e-30, 1e-6, 1.0, 1e6, 1e30])[:, None],
        "one": torch.tensor([-3.0]),
        "width 1": normal(3, 2, 1),
        "width 63": normal(2, 63),
        "bf16": (normal(2, 4, 192) ** 3).bfloat16(),
        "fp16": (normal(2, 4, 70) * 20000).clamp(-65504, 65504).half(),
        "ties": torch.ones(1, 10, 64),
        "near outliers": near,
    }


@each("name", inputs())
@each("which", ["tah", "fixed-2", "fixed-4", "fixed-8", "fixed-9", "fixed-10"])
def test_bytes_and_values_equal_the_reference(name: str, which: str) -> None:
    x = inputs()[name]
    expected, values = reference_tah(x) if which == "tah" else reference_fixed(x, int(which[6:]))
    made = codec(which).encode(x)
    assert made.numpy().tobytes() == expected
    decoded = codec(which).decode(made, TensorSpec(x.dtype, tuple(x.shape)))
    limit = torch.finfo(x.dtype).max
    clamped = torch.tensor(values, dtype=torch.float64).clamp(-limit, limit)
    # Through fp32, as the codec does: bf16 and fp16 are rounded from it.
    assert torch.equal(decoded, clamped.float().to(x.dtype).view(x.shape))


@pytest.mark.parametrize("power", [1.0, 3.0, 9.0])
def test_entropy_is_shannons(power: float) -> None:
    magnitudes = torch.rand(200, 64, generator=torch.Generator().manual_seed(1)).pow(power).mul(2**14).round()
    p = magnitudes.double() / magnitudes.double().sum(1, keepdim=True)
    shannon = -torch.special.xlogy(p, p).sum(1) / math.log(2)
    assert (entropy_bits(magnitudes).double() / 2**20 - shannon).abs().max() < 1e-4


def test_log2_is_within_its_bound() -> None:
    values = [*range(1, 2**14 + 1), *range(2**14, 2**20 + 1, 997)]
    assert max(abs(log2(n) - math.log2(n)) for n in values) < 3e-5
