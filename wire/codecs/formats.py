"""The format of every codec, by the names that run files use. Without torch.

A `Format` states every fact about its codec: wire number, parameters and sizes, what it may carry, whether
it keeps state, how precise it is, what packing costs, and which class packs (`wire.codecs.base.Codec`).
All other code asks it, so a new codec is declared here and in its own module. The coordinator works with
formats alone. `trellis-R` and `dither-R` each stand for one codec at every rate R. `aqsgd-b` cannot pack
by itself: `wire.codecs.aqsgd` makes a codec from it for each tensor.
"""

import math
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache, lru_cache
from itertools import pairwise
from typing import ClassVar, Self

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
        """The bytes between and after sections."""
        return self._gaps

    @property
    def nbytes(self) -> int:
        """The bytes of all sections, with the gaps between and after them."""
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


class Carried(Flag):
    """What a codec may pack."""

    ACTIVATIONS = auto()
    GRADIENTS = auto()
    """Gradients of activations, between stages."""
    SUMS = auto()
    """Gradients of weights and their sums, between rows."""
    BOUNDARIES = ACTIVATIONS | GRADIENTS
    ALL = BOUNDARIES | SUMS

    @property
    def words(self) -> str:
        """What it may carry, in words for messages."""
        return {Carried.ACTIVATIONS: "activations", Carried.GRADIENTS: "gradients of activations"}.get(
            self, "sums of gradients"
        )


class Format(ABC):
    """All facts about one codec. Sizes depend on shape and parameters alone."""

    name: str
    parameters: Parameters
    precision: float
    """Bits an element of the `trellis` codec with about the same error; measured on boundary tensors
    (scripts/results/boundary_error.json)."""
    core_nanoseconds: tuple[float, float]
    """The time to encode and to decode an element on one core; the slowest of several measurements
    (scripts/results/codec_speed.json, rivals.json)."""

    IMPLEMENTATION: ClassVar[tuple[str, str]]
    """The module of `wire.codecs` and the class in it that packs; the class is called with the format."""
    CARRIES: ClassVar[Carried] = Carried.ALL
    REMEMBERS: ClassVar[bool] = False
    """Whether both ends keep a cache of samples."""
    COMPILES: ClassVar[bool] = True
    """Whether packing on a CPU compiles loops."""
    KERNELS: ClassVar[str] = ""
    """The kernels that pack on a GPU, of `kernels.common.dispatch.PARTS`; "" without any of its own."""
    GPU_SHARE: ClassVar[float] = 0.004
    """The share by which a GPU computes longer while it also packs
    (scripts/results/packing_overhead.json)."""
    PLANNED: ClassVar[tuple[str, ...]] = ()
    """Names among which `auto` chooses for activations."""
    PROPOSED: ClassVar[tuple[str, ...]] = ()
    """Names that advice proposes where a link limits the speed."""
    SUCCESSOR: ClassVar[str] = ""
    """A codec of activations that takes no more bytes and costs less loss, but more compute."""
    GRADIENT_SUCCESSOR: ClassVar[str] = ""
    """A codec of gradients that takes fewer bytes at no cost in loss that could be measured
    (scripts/results/losses.md), but more compute."""

    @property
    def family(self) -> str:
        """Codecs that pack in one way share it: what slows one of them slows all."""
        return self.name.partition("-")[0]

    @property
    def for_gradients(self) -> str:
        """The codec of gradients that belongs to this one of activations, for plans."""
        return self.name

    @property
    def golden(self) -> tuple[str, str]:
        """A codec that packs by the same arithmetic, and the digest of what it makes of a known tensor
        (`node.stage.self_test`). Both are empty where nothing is computed."""
        return "", ""

    @property
    def loss_forward(self) -> str:
        """The measured cost in held-out loss as the codec of activations, in words; "" if not measured."""
        return ""

    def packed_bytes(self, shape: tuple[int, ...]) -> int:
        """The bytes of a packed tensor, header included. Raises `CodecError` for a shape that cannot be
        packed."""
        check_shape(shape)
        return HEADER_BYTES + self.payload_bytes(shape)

    @abstractmethod
    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """The bytes after the header, for a shape that the header can describe."""


@lru_cache(maxsize=256)
def check_shape(shape: tuple[int, ...]) -> None:
    """Raise `CodecError` for a shape that the header cannot describe."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(0 < extent < 2**32 for extent in shape):
        raise CodecError(
            f"a tensor of shape {list(shape)} cannot be packed: "
            f"it needs 1 to {MAX_DIMENSIONS} dimensions, none of them empty"
        )


class RawFormat(Format):
    """Every element has `bits` bits; `number` distinguishes dtypes of the same width."""

    IMPLEMENTATION = ("raw", "RawCodec")
    COMPILES = False

    def __init__(self, name: str, number: int, bits: int, nanoseconds: tuple[float, float]) -> None:
        self.name = name
        self.precision = float(bits)
        self.core_nanoseconds = nanoseconds
        self.parameters = Parameters(codec=number, bits=bits)

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.parameters.bits // 8


class FixedFormat(Format):
    """`fixed-b`: b bits per element and one scale per tile. Raises `ConfigError` for bits or a constant out
    of range."""

    NUMBER = 4
    MIN_BITS = 2
    MAX_BITS = 10
    IMPLEMENTATION = ("fixed", "FixedCodec")
    KERNELS = "fixed"
    # Below 6 bits rounding to nearest leaves too much of a gradient out for a plan to choose it.
    PLANNED = PROPOSED = ("fixed-6", "fixed-8")
    GRADIENT_SUCCESSOR = "trellis-4.41"

    core_nanoseconds = (4.2, 2.0)

    _GOLDEN: ClassVar[dict[int, str]] = {
        2: "c876cf98f2291b7c",
        3: "2900ac680954b2d3",
        4: "23487e4e80e5c248",
        5: "90731e261710e489",
        6: "23d82a991100bd1b",
        7: "d07d5e55a1533b6c",
        8: "6790cf0ea8abaa7f",
        9: "b618c90cd8d9b9f6",
        10: "ff5791d93e044be2",
    }

    def __init__(self, bits: int, constant: float = 1.0) -> None:
        if not self.MIN_BITS <= bits <= self.MAX_BITS:
            raise ConfigError(f"fixed-{bits} is no codec: {self.range()} are")
        if not 2.0**-64 <= constant <= 2.0**64:
            raise ConfigError(f"constant {constant} of fixed-{bits} must be positive, from 2**-64 to 2**64")
        self.name = f"fixed-{bits}"
        self.precision = bits - 0.5
        # The header carries the constant in fp32, and both ends compute with that value.
        (rounded,) = struct.unpack("<f", struct.pack("<f", constant))
        self.parameters = Parameters(codec=self.NUMBER, bits=bits, tile=TILE, constant=rounded)

    @property
    def golden(self) -> tuple[str, str]:
        return f"fixed-{self.parameters.bits}", self._GOLDEN[self.parameters.bits]

    @classmethod
    def range(cls) -> str:
        """The names that there are, for messages."""
        return f"fixed-{cls.MIN_BITS} to fixed-{cls.MAX_BITS}"

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
    IMPLEMENTATION = ("tah", "TahCodec")
    KERNELS = "tah"
    CARRIES = Carried.BOUNDARIES
    PROPOSED = ("tah",)
    SUCCESSOR = "trellis-4.41"

    name = "tah"
    precision = 2.9
    core_nanoseconds = (6.3, 2.2)
    loss_forward = "1.4 %"
    golden = "tah", "f4f08814c0a3c246"
    parameters = Parameters(codec=NUMBER, bits=4, tile=TILE, share=SHARE, tau=TAU)

    @classmethod
    def range(cls) -> str:
        """The names that there are, for messages."""
        return cls.name

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
    """`trellis-R`: R bits per element, header included. Raises `ConfigError` for a rate out of range."""

    NUMBER = 7
    PREFIX = "trellis-"
    MIN_RATE = 2.0
    MAX_RATE = 10.0
    IMPLEMENTATION = ("trellis", "TrellisCodec")
    KERNELS = "trellis"
    GPU_SHARE = 0.0163
    # The least error for the bytes; on CPUs it packs many times slower than the others.
    PLANNED: ClassVar[tuple[str, ...]] = (
        *("trellis-2", "trellis-2.5", "trellis-3", "trellis-3.5", "trellis-4", "trellis-4.41"),
        *("trellis-5", "trellis-6", "trellis-7", "trellis-8"),
    )
    PROPOSED: ClassVar[tuple[str, ...]] = ("trellis-4", "trellis-4.41")

    core_nanoseconds = (71.3, 18.7)
    golden: ClassVar[tuple[str, str]] = "trellis-4.41", "a1229f1b9b8c91bc"

    _RATE = re.compile(r"\d{1,2}(?:\.\d{1,3})?", re.ASCII)
    _RATE_UNIT = 1000
    # A tensor with fewer elements gets its header, and as much again for the fixed parts, on top of its rate.
    _SMALL = 4096

    def __init__(self, rate: float) -> None:
        thousandths = round(rate * self._RATE_UNIT) if math.isfinite(rate) else 0
        if not self.MIN_RATE * self._RATE_UNIT <= thousandths <= self.MAX_RATE * self._RATE_UNIT:
            raise ConfigError(f"{self.PREFIX}{rate:g} is no codec: {self.range()} are")
        self.name = f"{self.PREFIX}{thousandths / self._RATE_UNIT:g}"
        self.precision = thousandths / self._RATE_UNIT
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

    @property
    def for_gradients(self) -> str:
        """The format for gradients: at low rates they need a codec whose error has a mean of zero."""
        return f"{DitherFormat.PREFIX}{self.rate:g}"

    @property
    def loss_forward(self) -> str:
        return "nothing that could be measured" if self.rate == 4.41 else ""

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        rate = self.parameters.share
        at_rate = rate * math.prod(shape) // (8 * self._RATE_UNIT)
        small = min(at_rate, rate * self._SMALL // (8 * self._RATE_UNIT)) + HEADER_BYTES
        return max(at_rate - HEADER_BYTES, small)


class DitherFormat(TrellisFormat):
    """`dither-R`: like `trellis-R`, with dither that is subtracted."""

    NUMBER = 10
    PREFIX = "dither-"
    IMPLEMENTATION = ("trellis", "DitherCodec")
    CARRIES = Carried.BOUNDARIES
    PLANNED: ClassVar[tuple[str, ...]] = ()
    PROPOSED: ClassVar[tuple[str, ...]] = ()

    golden: ClassVar[tuple[str, str]] = "dither-4.41", "15063f69a20e2f60"
    loss_forward = ""


class AqsgdFormat(Format):
    """`aqsgd-b`: b bits per element, like `fixed-b`, for tensors `[n, ...]` of n samples that are all
    cached."""

    NUMBER = 9
    PREFIX = "aqsgd-"
    MIN_BITS = 2
    MAX_BITS = 8
    IMPLEMENTATION = ("aqsgd", "AqsgdCodec")
    KERNELS = "fixed"
    CARRIES = Carried.ACTIVATIONS
    REMEMBERS = True

    core_nanoseconds = FixedFormat.core_nanoseconds

    def __init__(self, bits: int) -> None:
        if not self.MIN_BITS <= bits <= self.MAX_BITS:
            raise ConfigError(f"{self.PREFIX}{bits} is no codec: {self.range()} are")
        self.name = f"{self.PREFIX}{bits}"
        self.precision = bits - 0.5
        self.parameters = Parameters(codec=self.NUMBER, bits=bits, tile=TILE, constant=1.0)
        self.changes = FixedFormat(bits)
        """The format in which changes of known samples are packed."""

    @property
    def golden(self) -> tuple[str, str]:
        return self.changes.golden

    @classmethod
    def range(cls) -> str:
        """The names that there are, for messages."""
        return f"{cls.PREFIX}{cls.MIN_BITS} to {cls.PREFIX}{cls.MAX_BITS}"

    @classmethod
    def named(cls, name: str) -> "AqsgdFormat | None":
        """The format with that name, if it is one of these."""
        bits = name.removeprefix(cls.PREFIX)
        known = bits != name and bits.isdecimal() and len(bits) == 1
        return cls(int(bits)) if known and cls.MIN_BITS <= int(bits) <= cls.MAX_BITS else None

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return self.changes.payload_bytes(shape)

    def first_pass_bytes(self, shape: tuple[int, ...]) -> int:
        """The bytes of a packed tensor whose samples are all new, header included."""
        check_shape(shape)
        return HEADER_BYTES + self.new_bytes(shape, shape[0])

    @staticmethod
    def new_bytes(shape: tuple[int, ...], samples: int) -> int:
        """The bytes of `samples` new samples in bf16, rounded up to where the next part starts."""
        return aligned(2 * math.prod(shape) // shape[0] * samples)


class HalfFormat(RawFormat):
    """`fp16`, scaled by one power of two per tensor."""

    IMPLEMENTATION = ("raw", "HalfCodec")


FP32 = RawFormat("fp32", 1, 32, (1.7, 1.7))
BF16 = RawFormat("bf16", 2, 16, (0.8, 1.1))
FP16 = HalfFormat("fp16", 8, 16, (6.1, 6.9))

_KINDS: tuple[type[FixedFormat | TahFormat | TrellisFormat | AqsgdFormat], ...] = (
    *(FixedFormat, TahFormat, TrellisFormat, AqsgdFormat, DitherFormat),
)
WIRE_NUMBERS = (*(raw.parameters.codec for raw in (FP32, BF16, FP16)), *(kind.NUMBER for kind in _KINDS))
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


@cache
def planned_names() -> tuple[str, ...]:
    """Codecs of activations among which `auto` chooses, the least precise first."""
    return _by_precision(name for kind in _KINDS for name in kind.PLANNED)


def ladder(min_bits: float) -> tuple[str, ...]:
    """Those of `planned_names` with at least this precision. Raises ConfigError if none is left."""
    names = planned_names()
    allowed = tuple(name for name in names if codec_format(name).precision >= min_bits)
    if not allowed:
        most = codec_format(names[-1]).precision
        raise ConfigError(f"pipeline.min_bits is {min_bits:g}; it must be at most {most:g}")
    return allowed


@cache
def proposed_names() -> tuple[str, ...]:
    """Codecs that advice proposes, the most precise first."""
    return _by_precision(name for kind in _KINDS for name in kind.PROPOSED)[::-1]


def _by_precision(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: codec_format(name).precision))


def names_that_carry(what: Carried) -> str:
    """The codecs that may pack this, with ranges for families, in words for an error."""
    kinds = [
        *(raw.name for raw in (FP32, BF16, FP16)),
        *(kind.range() for kind in _KINDS if what in kind.CARRIES),
    ]
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"


def known_format(name: str) -> Format | None:
    """The format of the codec called `name`, or None where that names no codec, such as `auto`."""
    try:
        return codec_format(name)
    except ConfigError:
        return None


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
        raise ConfigError(f"unknown codec {name!r}: {AqsgdFormat.range()} are")
    if bits := re.fullmatch(r"fixed-([0-9]{1,4})", name):
        closest = max(FixedFormat.MIN_BITS, min(FixedFormat.MAX_BITS, int(bits[1])))
        raise ConfigError(f"unknown codec {name!r}; did you mean 'fixed-{closest}'?")
    known = *_FORMATS, AqsgdFormat.range(), TrellisFormat.range(), DitherFormat.range()
    raise ConfigError(f"unknown codec {name!r}{nearest(name, known)}")
