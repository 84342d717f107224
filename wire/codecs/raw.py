"""`fp32`, `bf16` and `fp16`: the elements as they are, or rounded to nearest even. Baselines."""

import torch

from kernels.tiles import NON_FINITE
from wire.codecs.base import Codec
from wire.codecs.header import Parameters
from wire.errors import NonFiniteError
from wire.spec import TensorSpec


class RawCodec(Codec):
    """Sends every element in one dtype. Values beyond that dtype's range are refused, not clipped."""

    exponents = range(1)

    def __init__(self, name: str, number: int, dtype: torch.dtype) -> None:
        self.name = name
        self.parameters = Parameters(codec=number, bits=8 * dtype.itemsize)
        self._dtype = dtype

    def _payload_bytes(self, spec: TensorSpec) -> int:
        return spec.elements * self._dtype.itemsize

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        elements = payload.view(self._dtype)
        elements.view(tensor.shape).copy_(tensor)
        return torch.where(_finite(elements), 0, NON_FINITE).int()

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        out.copy_(payload.view(self._dtype).view(out.shape))
        if not _finite(out):
            raise NonFiniteError(
                f"a packed {self.name} tensor of shape {list(out.shape)} holds infinities or NaNs: "
                "refused; the sender's codec should have done so"
            )


def _finite(x: torch.Tensor) -> torch.Tensor:
    # NaNs win over every number, so two extremes tell of all elements.
    low, high = torch.aminmax(x)
    return torch.isfinite(low) & torch.isfinite(high)
