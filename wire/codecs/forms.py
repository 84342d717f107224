"""The forms of all codecs, by the names that run files use. Torch-free.

`trellis-R` stands for one codec for every rate R. `aqsgd-b` packs nothing by itself: `wire.codecs.aqsgd`
makes a codec of it for each tensor.
"""

import math
import re
import struct
from difflib import get_close_matches
from functools import lru_cache

from kernels.common.tile_layout import LOW_PLANES, TILE, tiles_per_row
from wire.codecs.form import HEADER_BYTES, Form, Parameters, check_shape
from wire.codecs.sections import Section, Sections, aligned
from wire.errors import ConfigError


class RawForm(Form):
    """Every element as it is, in so many bits; the header tells dtypes of as many bits apart by `number`."""

    def __init__(self, name: str, number: int, bits: int) -> None:
        self.name = name
        self.parameters = Parameters(codec=number, bits=bits)

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.parameters.bits // 8


FP32 = RawForm("fp32", 1, 32)
BF16 = RawForm("bf16", 2, 16)
FP16 = RawForm("fp16", 8, 16)


class FixedForm(Form):
    """`fixed-b`: b bits an element and a scale a tile. `ConfigError` for bits or a constant out of range."""

    MIN_BITS = 2
    MAX_BITS = 10

    def __init__(self, bits: int, constant: float = 1.0) -> None:
        if not self.MIN_BITS <= bits <= self.MAX_BITS:
            raise ConfigError(f"fixed-{bits} is no codec: fixed-{self.MIN_BITS} to fixed-{self.MAX_BITS} are")
        if not 2.0**-64 <= constant <= 2.0**64:
            raise ConfigError(f"constant {constant} of fixed-{bits} must be positive, from 2**-64 to 2**64")
        self.name = f"fixed-{bits}"
        # What the header carries and both ends compute with is the constant in fp32.
        (rounded,) = struct.unpack("<f", struct.pack("<f", constant))
        self.parameters = Parameters(codec=4, bits=bits, tile=TILE, constant=rounded)

    def sections(self, shape: tuple[int, ...]) -> tuple[Section, ...]:
        """Scales; bit-planes, lowest first, a 64-bit word for each tile."""
        tiles = math.prod(shape[:-1]) * tiles_per_row(shape[-1])
        return ("float16", (tiles,)), ("int64", (self.parameters.bits, tiles))

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        return Sections(*self.sections(shape)).nbytes


class TahForm(Form):
    """`tah`, which gives so many tiles of each sample 4 bits, and the others 3.

    A sample is an index of the first of three or more dimensions; fewer dimensions are one sample.
    """

    SHARE = 8000
    """Of a sample's tiles, in ten-thousandths, that get 4 bits (TAH-Quant, section 3.2)."""
    TAU = 2.0
    """The ratio that makes an outlier (section 3.3)."""

    name = "tah"
    parameters = Parameters(codec=5, bits=4, tile=TILE, share=SHARE, tau=TAU)

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
    """How many of a sample's tiles get 4 bits: exactly round(p * tiles), which is never a tie for p = 4/5."""
    return (tiles * TahForm.SHARE + 5000) // 10000


def samples_and_tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    """Samples of a tensor, and tiles of each."""
    samples = shape[0] if len(shape) >= 3 else 1
    return samples, math.prod(shape[:-1]) // samples * tiles_per_row(shape[-1])


class TrellisForm(Form):
    """`trellis-R`: R bits an element, header included. `ConfigError` for a rate out of range."""

    PREFIX = "trellis-"
    MIN_RATE = 2.0
    MAX_RATE = 10.0
    RANGE = f"{PREFIX}{MIN_RATE:g} to {PREFIX}{MAX_RATE:g}"

    _NAME = re.compile(r"trellis-(\d{1,2}(?:\.\d{1,3})?)", re.ASCII)
    _RATE_UNIT = 1000
    # A tensor of fewer elements gets its header, and as much again for the fixed parts, on top of its rate.
    _SMALL = 4096

    def __init__(self, rate: float) -> None:
        thousandths = round(rate * self._RATE_UNIT) if math.isfinite(rate) else 0
        if not self.MIN_RATE * self._RATE_UNIT <= thousandths <= self.MAX_RATE * self._RATE_UNIT:
            raise ConfigError(f"{self.PREFIX}{rate:g} is no codec: {self.RANGE} are")
        self.name = f"{self.PREFIX}{thousandths / self._RATE_UNIT:g}"
        self.parameters = Parameters(codec=7, bits=0, share=thousandths)

    @classmethod
    def named(cls, name: str) -> "TrellisForm | None":
        """The form of a name such as `trellis-4.41`, with at most three decimals; None for other names."""
        match = cls._NAME.fullmatch(name)
        return cls(float(match[1])) if match else None

    @property
    def rate(self) -> float:
        """Bits an element."""
        return self.parameters.share / self._RATE_UNIT

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        rate = self.parameters.share
        at_rate = rate * math.prod(shape) // (8 * self._RATE_UNIT)
        small = min(at_rate, rate * self._SMALL // (8 * self._RATE_UNIT)) + HEADER_BYTES
        return max(at_rate - HEADER_BYTES, small)


class AqsgdForm(Form):
    """`aqsgd-b`: b bits an element of tensors `[n, ...]` whose n samples are all known, as in `fixed-b`."""

    PREFIX = "aqsgd-"
    MIN_BITS = 2
    MAX_BITS = 8
    RANGE = f"{PREFIX}{MIN_BITS} to {PREFIX}{MAX_BITS}"

    def __init__(self, bits: int) -> None:
        if not self.MIN_BITS <= bits <= self.MAX_BITS:
            raise ConfigError(f"{self.PREFIX}{bits} is no codec: {self.RANGE} are")
        self.name = f"{self.PREFIX}{bits}"
        self.parameters = Parameters(codec=7, bits=bits, tile=TILE, constant=1.0)
        self._changes = FixedForm(bits)

    @classmethod
    def named(cls, name: str) -> "AqsgdForm | None":
        """The form of that name, if it is one of these."""
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
        """Bytes of the part for so many new samples, in bf16, filled up to where the next part starts."""
        return aligned(2 * math.prod(shape) // shape[0] * samples)


_FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        FP32,
        BF16,
        FP16,
        *(FixedForm(bits) for bits in range(FixedForm.MIN_BITS, FixedForm.MAX_BITS + 1)),
        TahForm(),
        # One of many rates, for those who go through all codecs.
        TrellisForm(4.0),
    )
}
_FIXED_NAMES = [name for name in _FORMS if not name.startswith(TrellisForm.PREFIX)]


def codec_names() -> tuple[str, ...]:
    """Every name that `form` knows but for those with a memory, and one rate of those with a rate."""
    return tuple(_FORMS)


@lru_cache(maxsize=1024)
def form(name: str) -> Form:
    """The form of the codec of that name. `ConfigError` for another name."""
    found = _FORMS.get(name) or TrellisForm.named(name) or AqsgdForm.named(name)
    if found is not None:
        return found
    if name.startswith(TrellisForm.PREFIX):
        raise ConfigError(f"unknown codec {name!r}: {TrellisForm.RANGE} are, with at most three decimals")
    if name.startswith(AqsgdForm.PREFIX):
        raise ConfigError(f"unknown codec {name!r}: {AqsgdForm.RANGE} are")
    close = get_close_matches(name, _FORMS, n=1)
    known = f"{', '.join(_FIXED_NAMES)}, {AqsgdForm.RANGE} or {TrellisForm.RANGE}"
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {known}"
    raise ConfigError(f"unknown codec {name!r}: {hint}")
