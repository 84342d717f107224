"""What is known of a codec without packing anything: its name, parameters and sizes. Torch-free.

A coordinator counts bytes and checks names with forms alone; `wire.codecs.base.Codec` packs by one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from wire.errors import CodecError

HEADER_BYTES = 64
MAX_DIMENSIONS = 5
"""Of a tensor that the header can describe."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What tells one codec from another. Floats are compared as fp32."""

    codec: int
    bits: int
    tile: int = 0
    share: int = 0
    tau: float = 0.0
    constant: float = 0.0


class Form(ABC):
    """The name and the parameters of a codec, and its sizes, which depend on shape and parameters alone."""

    name: str
    parameters: Parameters

    def packed_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a whole packed tensor, header included. `CodecError` for what cannot be packed."""
        check_shape(shape)
        return HEADER_BYTES + self.payload_bytes(shape)

    @abstractmethod
    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes behind the header, for a shape that the header can describe."""


def check_shape(shape: tuple[int, ...]) -> None:
    """Refuse what the header cannot describe with `CodecError`."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS or not all(0 < extent < 2**32 for extent in shape):
        raise CodecError(
            f"a tensor of shape {list(shape)} cannot be packed: "
            f"it needs 1 to {MAX_DIMENSIONS} dimensions, none of them empty"
        )
