"""On a GPU the same tensors give the same bits."""

import pytest
import torch

from tests.support.cases import each
from wire.codecs.header import seal
from wire.codecs.registry import codec, codec_names
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def inputs() -> dict[str, torch.Tensor]:
    x = torch.randn(3, 64, 200, generator=torch.Generator().manual_seed(0))
    x[..., 7] *= 40
    x[0, 3] = 0
    return {
        "fp32": x,
        "bf16": x.bfloat16(),
        "fp16": x.half(),
        "tiny": x * 1e-38,
        "large": x * 1e36,
        "whole tiles": x[..., :192].contiguous(),
    }


@each("which", inputs())
@each("name", codec_names())
def test_a_gpu_gives_a_cpus_bits(name: str, which: str) -> None:
    x = inputs()[which]
    spec = TensorSpec(x.dtype, tuple(x.shape))
    expected = codec(name).encode(x)
    packed = codec(name).encode(x.cuda())
    assert packed.is_cuda and torch.equal(packed.cpu(), expected)
    decoded = codec(name).decode(packed, spec)
    assert decoded.is_cuda and torch.equal(decoded.cpu(), codec(name).decode(expected, spec))


@each("name", codec_names())
def test_non_finite_values_are_refused_when_sealed(name: str) -> None:
    x = torch.randn(2, 100, device="cuda")
    x[1, 50] = float("nan")
    packed = codec(name).pack(x).cpu()
    with pytest.raises(NonFiniteError):
        seal(packed.numpy())
