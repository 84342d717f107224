"""The format of every codec, by the names that run files use: wire number, parameters, sizes. Without torch.

The coordinator counts bytes and checks names with formats alone; `wire.codecs.base.Codec` does the packing.
`trellis-R` and `dither-R` each stand for one codec at every rate R. `aqsgd-b` packs nothing by itself:
`wire.codecs.aqsgd` makes a codec of it for each tensor.
"""

import math
import re
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Self

from kernels.common.tile_layout import LOW_PLANES, TILE, tiles_per_row
from wire.errors import CodecError, ConfigError, nearest

HEADER_BYTES = 64
MAX_DIMENSIONS = 5
"""The most dimensions a header can describe."""

_ALIGNMENT = 16
_ITEM_BYTES = {"uint8": 1, "float16": 2, "int64": 8}

Section = tuple[str, tuple[int, ...]]
"""Dtype name and shape of one section of a payload."""


def aligned(size: int) -> int:
    """`size` rounded up to where the next section may start."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Sections:
    """Offsets of a payload's sections, in the order given, each at a multiple of 16 bytes."""

    def __init__(self, *sections: Section) -> None:
        self._sections = sections
        self._sizes = [math.prod(shape) * _ITEM_BYTES[dtype] for dtype, shape in sections]
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + aligned(size))
        spans = zip(pairwise(self._starts), self._sizes, strict=True)
        self._gaps = [slice(start + size, end) for (start, end), size in spans if start + size < end]

    @property
    def gaps(self) -> list[slice]:
        """Bytes between and after sections."""
        return self._gaps

    @property
    def nbytes(self) -> int:
        """Bytes of all sections, with the gaps between and after them."""
        return self._starts[-1]


@dataclass(frozen=True, slots=True)
class Parameters:
    """The header fields that identify a codec. Floats are compared as fp32."""

    codec: int
    """Wire number; see `WIRE_NUMBERS`."""
    bits: int
    tile: int = 0
    share: int = 0
    tau: float = 0.0
    constant: float = 0.0


class Format(ABC):
    """Name, parameters and sizes of one codec. Sizes depend on shape and parameters alone."""

    name: str
    parameters: Parameters

    def packed_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a packed tensor, header included. `CodecError` for a shape that cannot be packed."""
        check_shape(shape)
        return HEADER_BYTES + self.payload_bytes(shape)

    @abstractmethod
    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes after the header, for a shape that the header can describe."""


@lru_cache(maxsize=256)
def check_shape(shape: tuple[int, ...]) -> None:
    """Raise `CodecError` for a shape that the header cannot describe."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(0 < extent < 2**32 for extent in shape):
        raise CodecError(
            f"a tensor of shape {list(shape)} cannot be packed: "
            f"it needs 1 to {MAX_DIMENSIONS} dimensions, none of them empty"
        )


class RawFormat(Format):
    """Every element in `bits` bits; `number` distinguishes dtypes of the same width."""

    def __init__(self, name: str, number: int, bits: int) -> None:
        self.name = name
        self.parameters = Parameters(codec=number, bits=bits)

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.parameters.bits // 8


class FixedFormat(Format):
    """`fixed-b`: b bits an element, one scale a tile. `ConfigError` for bits or a constant out of range."""

    NUMBER = 4
    MIN_BITS = 2
    MAX_BITS = 10

    def __init__(self, bits: int, constant: float = 1.0) -> None:
        if not self.MIN_BITS <= bits <= self.MAX_BITS:
            raise ConfigError(f"fixed-{bits} is no codec: fixed-{self.MIN_BITS} to fixed-{self.MAX_BITS} are")
        if not 2.0**-64 <= constant <= 2.0**64:
            raise ConfigError(f"constant {constant} of fixed-{bits} must be positive, from 2**-64 to 2**64")
        self.name = f"fixed-{bits}"
        # The header carries the constant in fp32, and both ends compute with that value.
        (rounded,) = struct.unpack("<f", struct.pack("<f", constant))
        self.parameters = Parameters(codec=self.NUMBER, bits=bits, tile=TILE, constant=rounded)

    def sections(self, shape: tuple[int, ...]) -> tuple[Section, ...]:
        """Scales; bit-planes, lowest first, a 64-bit word for each tile."""
        tiles = math.prod(shape[:-1]) * tiles_per_row(shape[-1])
        return ("float16", (tiles,)), ("int64", (self.parameters.bits, tiles))

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return Sections(*self.sections(shape)).nbytes


class TahFormat(Format):
    """`tah`: in each sample a fixed share of the tiles gets 4 bits, the others 3.

    With three or more dimensions a sample is an index of the first; a smaller tensor is one sample.
    """

    NUMBER = 5
    SHARE = 8000
    """Tiles of a sample that get 4 bits, in ten-thousandths (TAH-Quant, section 3.2)."""
    TAU = 2.0
    """The ratio that makes an outlier tile (section 3.3)."""

    name = "tah"
    parameters = Parameters(codec=NUMBER, bits=4, tile=TILE, share=SHARE, tau=TAU)

    def sections(self, shape: tuple[int, ...]) -> tuple[Section, ...]:
        """Scales; zero-points; bit-map; pivots; planes of all tiles; fourth planes of the 4-bit tiles."""
        samples, tiles = samples_and_tiles(shape)
        n = samples * tiles
        return (
            ("float16", (n,)),
            ("float16", (n,)),
            ("uint8", (-(-n // 8),)),
            ("uint8", (-(-n * 6 // 8),)),
            ("int64", (LOW_PLANES, n)),
            ("int64", (samples * four_bit_tiles(tiles),)),
        )

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return Sections(*self.sections(shape)).nbytes


def four_bit_tiles(tiles: int) -> int:
    """4-bit tiles among a sample's `tiles`: round(p * tiles), which is never a tie for p = 4/5."""
    return (tiles * TahFormat.SHARE + 5000) // 10000


def samples_and_tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    """(samples in a tensor, tiles in each sample)."""
    samples = shape[0] if len(shape) >= 3 else 1
    return samples, math.prod(shape[:-1]) // samples * tiles_per_row(shape[-1])


class TrellisFormat(Format):
    """`trellis-R`: R bits an element, header included. `ConfigError` for a rate out of range."""

    NUMBER = 7
    PREFIX = "trellis-"
    MIN_RATE = 2.0
    MAX_RATE = 10.0

    _RATE = re.compile(r"\d{1,2}(?:\.\d{1,3})?", re.ASCII)
    _RATE_UNIT = 1000
    # A tensor with fewer elements gets its header, and as much again for the fixed parts, on top of its rate.
    _SMALL = 4096

    def __init__(self, rate: float) -> None:
        thousandths = round(rate * self._RATE_UNIT) if math.isfinite(rate) else 0
        if not self.MIN_RATE * self._RATE_UNIT <= thousandths <= self.MAX_RATE * self._RATE_UNIT:
            raise ConfigError(f"{self.PREFIX}{rate:g} is no codec: {self.range()} are")
        self.name = f"{self.PREFIX}{thousandths / self._RATE_UNIT:g}"
        self.parameters = Parameters(codec=self.NUMBER, bits=0, share=thousandths)

    @classmethod
    def named(cls, name: str) -> Self | None:
        """The format for a name such as `trellis-4.41` (at most three decimals); None for other names."""
        rate = name.removeprefix(cls.PREFIX)
        return cls(float(rate)) if rate != name and cls._RATE.fullmatch(rate) else None

    @classmethod
    def range(cls) -> str:
        """The names that there are, for messages."""
        return f"{cls.PREFIX}{cls.MIN_RATE:g} to {cls.PREFIX}{cls.MAX_RATE:g}"

    @property
    def rate(self) -> float:
        """Bits an element."""
        return self.parameters.share / self._RATE_UNIT

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        rate = self.parameters.share
        at_rate = rate * math.prod(shape) // (8 * self._RATE_UNIT)
        small = min(at_rate, rate * self._SMALL // (8 * self._RATE_UNIT)) + HEADER_BYTES
        return max(at_rate - HEADER_BYTES, small)


class DitherFormat(TrellisFormat):
    """`dither-R`: as `trellis-R`, with dither that is subtracted."""

    NUMBER = 10
    PREFIX = "dither-"


class AqsgdFormat(Format):
    """`aqsgd-b`: b bits an element, as `fixed-b`, for tensors `[n, ...]` of n samples that are all cached."""

    NUMBER = 9
    PREFIX = "aqsgd-"
    MIN_BITS = 2
    MAX_BITS = 8
    RANGE = f"{PREFIX}{MIN_BITS} to {PREFIX}{MAX_BITS}"

    def __init__(self, bits: int) -> None:
        if not self.MIN_BITS <= bits <= self.MAX_BITS:
            raise ConfigError(f"{self.PREFIX}{bits} is no codec: {self.RANGE} are")
        self.name = f"{self.PREFIX}{bits}"
        self.parameters = Parameters(codec=self.NUMBER, bits=bits, tile=TILE, constant=1.0)
        self._changes = FixedFormat(bits)

    @classmethod
    def named(cls, name: str) -> "AqsgdFormat | None":
        """The format with that name, if it is one of these."""
        for bits in range(cls.MIN_BITS, cls.MAX_BITS + 1):
            if name == f"{cls.PREFIX}{bits}":
                return cls(bits)
        return None

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return self._changes.payload_bytes(shape)

    def first_pass_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a packed tensor whose samples are all new, header included."""
        check_shape(shape)
        return HEADER_BYTES + self.new_bytes(shape, shape[0])

    @staticmethod
    def new_bytes(shape: tuple[int, ...], samples: int) -> int:
        """Bytes of `samples` new samples in bf16, rounded up to where the next part starts."""
        return aligned(2 * math.prod(shape) // shape[0] * samples)


FP32 = RawFormat("fp32", 1, 32)
BF16 = RawFormat("bf16", 2, 16)
FP16 = RawFormat("fp16", 8, 16)

WIRE_NUMBERS = (
    *(raw.parameters.codec for raw in (FP32, BF16, FP16)),
    *(kind.NUMBER for kind in (FixedFormat, TahFormat, TrellisFormat, AqsgdFormat, DitherFormat)),
)
"""Every codec's number in the header. A number that was used once is never given to another codec."""

_FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        FP32,
        BF16,
        FP16,
        *(FixedFormat(bits) for bits in range(FixedFormat.MIN_BITS, FixedFormat.MAX_BITS + 1)),
        TahFormat(),
        # One of many rates, for callers that go through all codecs.
        TrellisFormat(4.0),
        DitherFormat(4.0),
    )
}


def codec_names() -> tuple[str, ...]:
    """Every name that `codec_format` knows, except `aqsgd-b`; of `trellis-R` and `dither-R` one rate each."""
    return tuple(_FORMATS)


@lru_cache(maxsize=1024)
def codec_format(name: str) -> Format:
    """The format of the codec called `name`. `ConfigError` for an unknown name."""
    kinds = TrellisFormat, DitherFormat, AqsgdFormat
    found = _FORMATS.get(name) or next(filter(None, (kind.named(name) for kind in kinds)), None)
    if found is not None:
        return found
    for kind in (TrellisFormat, DitherFormat):
        if name.startswith(kind.PREFIX):
            raise ConfigError(f"unknown codec {name!r}: {kind.range()} are, with at most three decimals")
    if name.startswith(AqsgdFormat.PREFIX):
        raise ConfigError(f"unknown codec {name!r}: {AqsgdFormat.RANGE} are")
    if bits := re.fullmatch(r"fixed-([0-9]{1,4})", name):
        closest = max(FixedFormat.MIN_BITS, min(FixedFormat.MAX_BITS, int(bits[1])))
        raise ConfigError(f"unknown codec {name!r}; did you mean 'fixed-{closest}'?")
    known = *_FORMATS, AqsgdFormat.RANGE, TrellisFormat.range(), DitherFormat.range()
    raise ConfigError(f"unknown codec {name!r}{nearest(name, known)}")
