"""The format of every codec, by the names that run files use. This module does not need torch.

A `Format` holds all facts about a codec: wire number, parameters and sizes, what it may carry, whether it
keeps state, how precise it is, what packing costs, and which class packs (`wire.codecs.base.Codec`). All
other code asks the format, so a new codec is declared here and in its own module. The coordinator uses only
formats. `trellis-R` and `dither-R` are families with one codec for every rate R. `aqsgd-b` cannot pack
alone: `wire.codecs.aqsgd` makes a codec from it for each tensor.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache, lru_cache
from itertools import pairwise
from typing import ClassVar, Self

from kernels.common.tile_layout import LOW_PLANES, OUTLIER_RATIO, TILE, tiles_per_row
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
    """The offsets of a payload's sections, in the given order, each a multiple of 16 bytes."""

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
    """1 for `fixed` and `aqsgd`, else 0."""


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
        """What it may carry, for messages to people."""
        return {Carried.ACTIVATIONS: "activations", Carried.GRADIENTS: "gradients of activations"}.get(
            self, "sums of gradients"
        )


class Format(ABC):
    """All facts about one codec. Sizes depend on shape and parameters alone."""

    name: str
    parameters: Parameters
    precision: float
    """Bits per element of the `trellis` codec with about the same error, measured on boundary tensors
    (scripts/results/boundary_error.json)."""
    core_nanoseconds: tuple[float, float]
    """The time to encode and to decode an element on one core, in nanoseconds: the slowest of several
    measurements (scripts/results/codec_speed.json, rivals.json)."""

    IMPLEMENTATION: ClassVar[tuple[str, str]]
    """The module of `wire.codecs` and the class in it that packs. The class is called with the format."""
    CARRIES: ClassVar[Carried] = Carried.ALL
    REMEMBERS: ClassVar[bool] = False
    """Whether both ends keep a cache of samples."""
    COMPILES: ClassVar[bool] = True
    """Whether packing on a CPU compiles loops."""
    KERNELS: ClassVar[str] = ""
    """The kernels that pack on a GPU, one of `kernels.common.dispatch.PARTS`; "" if it has none."""
    GPU_SHARE: ClassVar[float] = 0.004
    """How much longer a GPU computes while it also packs, as a fraction
    (scripts/results/packing_overhead.json)."""
    PLANNED: ClassVar[tuple[str, ...]] = ()
    """The names from which `auto` chooses for activations."""
    PROPOSED: ClassVar[tuple[str, ...]] = ()
    """The names that advice proposes when a link is the bottleneck."""
    SUCCESSOR: ClassVar[str] = ""
    """An activation codec with no more bytes and a better loss that needs more compute."""
    GRADIENT_SUCCESSOR: ClassVar[str] = ""
    """A gradient codec with fewer bytes, more compute and no measurable cost in loss
    (scripts/results/losses.md)."""

    @property
    def family(self) -> str:
        """The family of codecs that pack in the same way, so that they share their speed."""
        return self.name.partition("-")[0]

    @property
    def for_gradients(self) -> str:
        """The gradient codec that plans use with this activation codec."""
        return self.name

    @property
    def golden(self) -> tuple[str, str]:
        """A codec with the same arithmetic, and the digest of its packed form of a known tensor
        (`node.stage.self_test`). Both are empty if the codec computes nothing."""
        return "", ""

    @property
    def loss_forward(self) -> str:
        """The measured cost in held-out loss as the activation codec, in words; "" if not measured."""
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
    """Every element has `bits` bits. `number` distinguishes dtypes of the same width."""

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
    """`fixed-b`: b bits per element and one scale per tile. Raises `ConfigError` for bits out of range."""

    NUMBER = 4
    MIN_BITS = 2
    MAX_BITS = 10
    IMPLEMENTATION = ("fixed", "FixedCodec")
    KERNELS = "fixed"
    # Below 6 bits, rounding to nearest loses too much of a gradient for a plan to choose it.
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

    def __init__(self, bits: int) -> None:
        if not self.MIN_BITS <= bits <= self.MAX_BITS:
            raise ConfigError(f"fixed-{bits} is not a codec; there are {self.range()}")
        self.name = f"fixed-{bits}"
        self.precision = bits - 0.5
        self.parameters = Parameters(codec=self.NUMBER, bits=bits, tile=TILE, constant=1.0)

    @property
    def golden(self) -> tuple[str, str]:
        return f"fixed-{self.parameters.bits}", self._GOLDEN[self.parameters.bits]

    @classmethod
    def range(cls) -> str:
        """The valid names, for messages."""
        return f"fixed-{cls.MIN_BITS} to fixed-{cls.MAX_BITS}"

    def sections(self, shape: tuple[int, ...]) -> tuple[Section, ...]:
        """Scales, then bit-planes, lowest first, with one 64-bit word per tile."""
        tiles = math.prod(shape[:-1]) * tiles_per_row(shape[-1])
        return ("float16", (tiles,)), ("int64", (self.parameters.bits, tiles))

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return Sections(*self.sections(shape)).nbytes


class TahFormat(Format):
    """`tah`: in each sample, a fixed share of the tiles gets 4 bits per element and the others get 3.

    With three or more dimensions, the first one counts samples; a smaller tensor is one sample.
    """

    NUMBER = 5
    SHARE = 8000
    """Tiles of a sample that get 4 bits, in ten-thousandths (TAH-Quant, section 3.2)."""
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
    parameters = Parameters(codec=NUMBER, bits=4, tile=TILE, share=SHARE, tau=OUTLIER_RATIO)

    @classmethod
    def range(cls) -> str:
        """The valid names, for messages."""
        return cls.name

    def sections(self, shape: tuple[int, ...]) -> tuple[Section, ...]:
        """Scales, zero-points, bit-map, pivots, planes of all tiles, fourth planes of the 4-bit tiles."""
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
    # It has the least error per byte, but packs many times slower than the others on CPUs.
    PLANNED: ClassVar[tuple[str, ...]] = (
        *("trellis-2", "trellis-2.5", "trellis-3", "trellis-3.5", "trellis-4", "trellis-4.41"),
        *("trellis-5", "trellis-6", "trellis-7", "trellis-8"),
    )
    PROPOSED: ClassVar[tuple[str, ...]] = ("trellis-4", "trellis-4.41")

    core_nanoseconds = (71.3, 18.7)
    golden: ClassVar[tuple[str, str]] = "trellis-4.41", "a1229f1b9b8c91bc"

    _RATE = re.compile(r"\d{1,2}(?:\.\d{1,3})?", re.ASCII)
    _RATE_UNIT = 1000
    # A smaller tensor gets its header, and as much again for the fixed parts, on top of its rate.
    _SMALL = 4096

    def __init__(self, rate: float) -> None:
        thousandths = round(rate * self._RATE_UNIT) if math.isfinite(rate) else 0
        if not self.MIN_RATE * self._RATE_UNIT <= thousandths <= self.MAX_RATE * self._RATE_UNIT:
            raise ConfigError(f"{self.PREFIX}{rate:g} is not a codec; there are {self.range()}")
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
        """The valid names, for messages."""
        return f"{cls.PREFIX}{cls.MIN_RATE:g} to {cls.PREFIX}{cls.MAX_RATE:g}"

    @property
    def rate(self) -> float:
        """Bits per element."""
        return self.parameters.share / self._RATE_UNIT

    @property
    def for_gradients(self) -> str:
        """The gradient codec: at low rates, gradients need an error with zero mean."""
        return f"{DitherFormat.PREFIX}{self.rate:g}"

    @property
    def loss_forward(self) -> str:
        return "nothing measurable" if self.rate == 4.41 else ""

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        rate = self.parameters.share
        at_rate = rate * math.prod(shape) // (8 * self._RATE_UNIT)
        small = min(at_rate, rate * self._SMALL // (8 * self._RATE_UNIT)) + HEADER_BYTES
        return max(at_rate - HEADER_BYTES, small)


class DitherFormat(TrellisFormat):
    """`dither-R`: `trellis-R` with subtractive dither."""

    NUMBER = 10
    PREFIX = "dither-"
    IMPLEMENTATION = ("trellis", "DitherCodec")
    CARRIES = Carried.BOUNDARIES
    PLANNED: ClassVar[tuple[str, ...]] = ()
    PROPOSED: ClassVar[tuple[str, ...]] = ()

    golden: ClassVar[tuple[str, str]] = "dither-4.41", "15063f69a20e2f60"
    loss_forward = ""


class AqsgdFormat(Format):
    """`aqsgd-b`: b bits per element, like `fixed-b`. Sizes are for tensors `[n, ...]` of n cached samples."""

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
            raise ConfigError(f"{self.PREFIX}{bits} is not a codec; there are {self.range()}")
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
        """The valid names, for messages."""
        return f"{cls.PREFIX}{cls.MIN_BITS} to {cls.PREFIX}{cls.MAX_BITS}"

    @classmethod
    def named(cls, name: str) -> "AqsgdFormat | None":
        """The format with this name, or None for other names."""
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
        """The bytes of `samples` new samples in bf16, rounded up to the start of the next part."""
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
"""Every codec's number in the header. A number is never reused for another codec."""

_FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        FP32,
        BF16,
        FP16,
        *(FixedFormat(bits) for bits in range(FixedFormat.MIN_BITS, FixedFormat.MAX_BITS + 1)),
        TahFormat(),
        # One of many rates, for callers that iterate over all codecs.
        TrellisFormat(4.0),
        DitherFormat(4.0),
    )
}


def codec_names() -> tuple[str, ...]:
    """Every name that `codec_format` knows except `aqsgd-b`; one rate of `trellis-R` and `dither-R`."""
    return tuple(_FORMATS)


@cache
def planned_names() -> tuple[str, ...]:
    """The activation codecs from which `auto` chooses, the least precise first."""
    return _by_precision(name for kind in _KINDS for name in kind.PLANNED)


def ladder(min_bits: float) -> tuple[str, ...]:
    """The `planned_names` with at least this precision. Raises ConfigError if there are none."""
    names = planned_names()
    allowed = tuple(name for name in names if codec_format(name).precision >= min_bits)
    if not allowed:
        most = codec_format(names[-1]).precision
        raise ConfigError(f"pipeline.min_bits is {min_bits:g}; it must be at most {most:g}")
    return allowed


@cache
def proposed_names() -> tuple[str, ...]:
    """The codecs that advice proposes, the most precise first."""
    return _by_precision(name for kind in _KINDS for name in kind.PROPOSED)[::-1]


def _by_precision(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: codec_format(name).precision))


def names_that_carry(what: Carried) -> str:
    """The codecs that may pack this, with a range for each family, for an error message."""
    kinds = [
        *(raw.name for raw in (FP32, BF16, FP16)),
        *(kind.range() for kind in _KINDS if what in kind.CARRIES),
    ]
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"


def known_format(name: str) -> Format | None:
    """The format of the codec called `name`, or None if there is none, as for `auto`."""
    try:
        return codec_format(name)
    except ConfigError:
        return None


@lru_cache(maxsize=1024)
def codec_format(name: str) -> Format:
    """The format of the codec called `name`. Raises `ConfigError` for an unknown name."""
    kinds = TrellisFormat, DitherFormat, AqsgdFormat
    known_codec = _FORMATS.get(name) or next(filter(None, (kind.named(name) for kind in kinds)), None)
    if known_codec is not None:
        return known_codec
    for kind in (TrellisFormat, DitherFormat):
        if name.startswith(kind.PREFIX):
            raise ConfigError(
                f"unknown codec {name!r}; there are {kind.range()}, with at most three decimals"
            )
    if name.startswith(AqsgdFormat.PREFIX):
        raise ConfigError(f"unknown codec {name!r}; there are {AqsgdFormat.range()}")
    if bits := re.fullmatch(r"fixed-([0-9]{1,4})", name):
        closest = max(FixedFormat.MIN_BITS, min(FixedFormat.MAX_BITS, int(bits[1])))
        raise ConfigError(f"unknown codec {name!r}; did you mean 'fixed-{closest}'?")
    known = *_FORMATS, AqsgdFormat.range(), TrellisFormat.range(), DitherFormat.range()
    raise ConfigError(f"unknown codec {name!r}{nearest(name, known)}")
