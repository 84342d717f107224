"""The 64-byte header of every packed tensor, and the checksum over header and payload.

Little endian:

    offset  bytes  field
         0      4  magic "TWPT"
         4      1  version of this layout
         5      1  codec
         6      1  bits per code
         7      1  tile, elements (0: raw)
         8      1  dtype of the tensor: 0 fp32, 1 bf16, 2 fp16
         9      1  dimensions, 1 to 5
        10      2  `tah`: share of 4-bit tiles, in ten-thousandths; `trellis`: rate in thousandths of a bit;
                   `aqsgd`: number of samples sent for the first time
        12      4  tau, fp32
        16      4  `fixed` and `aqsgd`: 1 in fp32
        20     20  extents, unused ones 0
        40      8  payload bytes
        48      4  the tensor's power-of-two exponent, signed
        52      4  `aqsgd`: the step at which both ends started their sample caches; else 0
        56      4  `aqsgd`: CRC32C of the cached activations that the tensor was packed against; else 0
        60      4  CRC32C of bytes 0 to 59 and of the payload

Everything except the exponent and the checksum follows from what was negotiated. A receiver compares it
and never relies on it.
"""

import struct
from dataclasses import dataclass

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.tiles import NON_FINITE
from wire.codecs.formats import HEADER_BYTES, MAX_DIMENSIONS, Parameters, check_shape
from wire.errors import CacheMismatchError, CodecError, NonFiniteError, PackedMismatchError
from wire.spec import TensorSpec

__all__ = [
    "CHECKSUM",
    "EXPONENT",
    "HEADER_BYTES",
    "Header",
    "PackedBytes",
    "Parameters",
    "check",
    "check_spec",
    "seal",
]

# On a GPU the codec writes the exponent on the device, so the host does not wait for it.
EXPONENT = slice(48, 52)
CHECKSUM = slice(60, 64)

_MAGIC = b"TWPT"
_VERSION = 1
_STRUCT = struct.Struct("<4sBBBBBBHff5IQiIII")
_CACHE = slice(52, 60)
_NAMES = (
    "magic",
    "version",
    "codec",
    "bits",
    "tile",
    "dtype",
    "dimensions",
    "share",
    "tau",
    "constant",
    *(f"extent {index}" for index in range(MAX_DIMENSIONS)),
    "payload bytes",
)
_EXTENTS = slice(10, 15)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

PackedBytes = bytes | bytearray | memoryview | NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Header:
    """The 64 bytes in front of a packed tensor, without the checksum."""

    parameters: Parameters
    spec: TensorSpec
    payload_bytes: int
    exponent: int = 0
    cache: tuple[int, int] | None = None
    """`aqsgd`: (first step of the sample cache, CRC32C of the entries that this tensor is packed against)."""

    def to_bytes(self) -> bytes:
        """The 64 bytes, with a checksum of zero."""
        codec = self.parameters
        shape = self.spec.shape
        return _STRUCT.pack(
            _MAGIC,
            _VERSION,
            codec.codec,
            codec.bits,
            codec.tile,
            _DTYPES.index(self.spec.dtype),
            len(shape),
            codec.share,
            codec.tau,
            codec.constant,
            *shape,
            *(0,) * (MAX_DIMENSIONS - len(shape)),
            self.payload_bytes,
            self.exponent,
            *(self.cache or (0, 0)),
            0,
        )


def check_spec(spec: TensorSpec) -> None:
    """Raise `CodecError` for a spec that the header cannot describe."""
    if spec.dtype not in _DTYPES:
        raise CodecError(f"a tensor of {spec.dtype} cannot be packed: use float32, bfloat16 or float16")
    check_shape(spec.shape)


def seal(buffer: bytearray | memoryview | NDArray[np.uint8]) -> None:
    """Write the checksum of a packed tensor in host memory. Raises `NonFiniteError` if it was not finite.

    The host reads the exponent only here, so packing on a GPU does not wait for it.
    """
    packed = np.frombuffer(buffer, dtype=np.uint8)
    if int(packed[EXPONENT].view("<i4")[0]) == NON_FINITE:
        fields = _STRUCT.unpack(packed[:HEADER_BYTES].tobytes())
        raise NonFiniteError(
            f"a tensor of shape {[extent for extent in fields[_EXTENTS] if extent]} was not packed: it holds "
            "infinities, NaNs or values beyond its codec's range; lower the learning rate or check the stage"
        )
    packed[CHECKSUM] = np.frombuffer(_checksum(packed).to_bytes(4, "little"), dtype=np.uint8)


def check(buffer: PackedBytes, expected: Header, exponents: range, agreed: bytes | None = None) -> Header:
    """Compare a received packed tensor with what was negotiated; return its header with the exponent.

    Checks length, every field, the exponent's range, the checksum and the sample cache, in this order, before
    anything is allocated. Raises `PackedMismatchError`, which names the first difference, or
    `CacheMismatchError` for the sample cache. `agreed` holds the bytes of `expected` if the caller has them.
    """
    packed = np.frombuffer(buffer, dtype=np.uint8)
    length = HEADER_BYTES + expected.payload_bytes
    if packed.size != length:
        raise PackedMismatchError(
            f"a packed tensor has {packed.size} bytes, not the {length} agreed: refused"
        )
    header = packed[:HEADER_BYTES].tobytes()
    agreed = agreed or expected.to_bytes()
    if header[: EXPONENT.start] != agreed[: EXPONENT.start]:
        pairs = zip(_NAMES, _STRUCT.unpack(header), _STRUCT.unpack(agreed), strict=False)
        # A negative zero differs in its bytes but not in its value.
        wrong = next((pair for pair in pairs if pair[1] != pair[2]), ("a number", -0.0, 0.0))
        raise PackedMismatchError("a packed tensor has {} {!r}, not the agreed {!r}: refused".format(*wrong))
    exponent = int.from_bytes(header[EXPONENT], "little", signed=True)
    if exponent not in exponents or (expected.cache is None and any(header[_CACHE])):
        raise PackedMismatchError(
            f"a packed tensor has exponent {exponent} (allowed: {exponents.start} to {exponents.stop - 1}) "
            "or unknown fields: refused"
        )
    if int.from_bytes(header[CHECKSUM], "little") != _checksum(packed):
        raise PackedMismatchError("a packed tensor's checksum is wrong: it was damaged, ask for it again")
    since, crc = struct.unpack("<II", header[_CACHE])
    if expected.cache is not None and (since, crc) != expected.cache:
        raise CacheMismatchError(
            f"the ends of a boundary hold different sample caches: the sender's since step {since}, CRC32C "
            f"{crc:08x}, this stage's since step {expected.cache[0]}, {expected.cache[1]:08x}: refused; this "
            "stage goes back to the newest snapshot"
        )
    return Header(expected.parameters, expected.spec, expected.payload_bytes, exponent, expected.cache)


def _checksum(packed: NDArray[np.uint8]) -> int:
    crc: int = google_crc32c.value(packed[: CHECKSUM.start].tobytes())
    return int(google_crc32c.extend(crc, packed[HEADER_BYTES:]))
