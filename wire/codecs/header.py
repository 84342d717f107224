"""The 64 bytes in front of every packed tensor, and the checksum over all of it.

Little endian:

    offset  bytes  field
         0      4  magic "TWPT"
         4      1  version of this layout
         5      1  codec
         6      1  bits a code
         7      1  tile, elements (0: raw)
         8      1  dtype of the tensor: 0 fp32, 1 bf16, 2 fp16
         9      1  dimensions, 1 to 5
        10      2  share of 4-bit tiles, in ten-thousandths; of `trellis`, the rate in thousandths of a bit;
                   of `aqsgd`, how many samples are sent for the first time
        12      4  tau, fp32
        16      4  constant c of a fixed-point codec, fp32
        20     20  extents, unused ones 0
        40      8  payload bytes
        48      4  the tensor's power-of-two exponent, signed
        52      4  of a codec with a memory: the step since which both ends remember; else 0
        56      4  of a codec with a memory: CRC32C of what the tensor was packed against; else 0
        60      4  CRC32C of bytes 0 to 59 and of the payload

All but the exponent and the checksum follow from what was negotiated, so a receiver compares; it never
believes.
"""

import struct
from dataclasses import dataclass, replace

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.tiles import NON_FINITE
from wire.codecs.form import HEADER_BYTES, MAX_DIMENSIONS, Parameters, check_shape
from wire.errors import CodecError, MemoryMismatchError, NonFiniteError, PackedMismatchError
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

# Where the exponent lies; a codec on a GPU fills it in there, without waiting for the value.
EXPONENT = slice(48, 52)
CHECKSUM = slice(60, 64)

_MAGIC = b"TWPT"
_VERSION = 1
_STRUCT = struct.Struct("<4sBBBBBBHff5IQiIII")
_MEMORY = slice(52, 60)
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
    """What the 64 bytes say, but for the checksum."""

    parameters: Parameters
    spec: TensorSpec
    payload_bytes: int
    exponent: int = 0
    memory: tuple[int, int] | None = None
    """(Since which step, CRC32C) of what a codec with a memory packs this tensor against."""

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
            *(self.memory or (0, 0)),
            0,
        )


def check_spec(spec: TensorSpec) -> None:
    """Refuse what the header cannot describe with `CodecError`."""
    if spec.dtype not in _DTYPES:
        raise CodecError(f"a tensor of {spec.dtype} cannot be packed: use float32, bfloat16 or float16")
    check_shape(spec.shape)


def seal(buffer: bytearray | memoryview | NDArray[np.uint8]) -> None:
    """Fill in the checksum of a packed tensor in host memory; `NonFiniteError` if the tensor was not finite.

    Here, not on the device, the encoder first sees the exponent: packing on a GPU waits for nothing.
    """
    packed = np.frombuffer(buffer, dtype=np.uint8)
    if int(packed[EXPONENT].view("<i4")[0]) == NON_FINITE:
        fields = _STRUCT.unpack(packed[:HEADER_BYTES].tobytes())
        raise NonFiniteError(
            f"a tensor of shape {[extent for extent in fields[_EXTENTS] if extent]} was not packed: it holds "
            "infinities, NaNs or values beyond its codec's range; lower the learning rate or check the stage"
        )
    packed[CHECKSUM] = np.frombuffer(_checksum(packed).to_bytes(4, "little"), dtype=np.uint8)


def check(buffer: PackedBytes, expected: Header, exponents: range) -> Header:
    """Compare a received packed tensor with what was negotiated; return its header, exponent filled in.

    Length, every field, the exponent's range, the checksum and what the ends remember, in this order, before
    anything is allocated. `PackedMismatchError` names the first that is wrong; the last is a
    `MemoryMismatchError`.
    """
    packed = np.frombuffer(buffer, dtype=np.uint8)
    length = HEADER_BYTES + expected.payload_bytes
    if packed.size != length:
        raise PackedMismatchError(
            f"a packed tensor has {packed.size} bytes, not the {length} agreed: refused"
        )
    header = packed[:HEADER_BYTES].tobytes()
    agreed = expected.to_bytes()
    if header[: EXPONENT.start] != agreed[: EXPONENT.start]:
        pairs = zip(_NAMES, _STRUCT.unpack(header), _STRUCT.unpack(agreed), strict=False)
        # Nothing differs in value where a zero has become negative.
        wrong = next((pair for pair in pairs if pair[1] != pair[2]), ("a number", -0.0, 0.0))
        raise PackedMismatchError("a packed tensor says {} {!r}, not the agreed {!r}: refused".format(*wrong))
    exponent = int.from_bytes(header[EXPONENT], "little", signed=True)
    if exponent not in exponents or (expected.memory is None and any(header[_MEMORY])):
        raise PackedMismatchError(
            f"a packed tensor has exponent {exponent} (allowed: {exponents.start} to {exponents.stop - 1}) "
            "or unknown fields: refused"
        )
    if int.from_bytes(header[CHECKSUM], "little") != _checksum(packed):
        raise PackedMismatchError("a packed tensor's checksum is wrong: it was damaged, ask for it again")
    since, crc = struct.unpack("<II", header[_MEMORY])
    if expected.memory is not None and (since, crc) != expected.memory:
        raise MemoryMismatchError(
            f"the ends of a boundary remember different activations: the sender since step {since}, CRC32C "
            f"{crc:08x}, this stage since step {expected.memory[0]}, {expected.memory[1]:08x}: refused; this "
            "stage goes back to the newest snapshot"
        )
    return replace(expected, exponent=exponent)


def _checksum(packed: NDArray[np.uint8]) -> int:
    crc: int = google_crc32c.value(packed[: CHECKSUM.start].tobytes())
    return int(google_crc32c.extend(crc, packed[HEADER_BYTES:]))
