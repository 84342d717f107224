"""Codecs for gradients: of any size, and of mixed sizes."""

import pytest
import torch

from tests.support.cases import each
from wire.codecs.registry import codec
from wire.spec import TensorSpec

# Codec, and the largest relative error on normal numbers.
CODECS = {"tah": 0.13, "fixed-4": 0.12, "fixed-6": 0.03, "fixed-8": 0.007, "fixed-10": 0.002}


def gradients(rows: int = 256, columns: int = 320, seed: int = 5) -> torch.Tensor:
    """Normal numbers in fp32, one sample."""
    return torch.randn((1, rows, columns), generator=torch.Generator().manual_seed(seed))


def decoded(name: str, x: torch.Tensor) -> torch.Tensor:
    return codec(name).decode(codec(name).encode(x), TensorSpec(x.dtype, tuple(x.shape)))


def error(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm())


@each("name", CODECS)
@each("size", [1e-38, 1e-30, 1e-12, 1e-5, 1.0, 1e5, 1e30])
def test_error_does_not_depend_on_size(name: str, size: float) -> None:
    """Paper, appendix G: gradients near 1e-5. A scale in fp16 alone ends at 6e-8, and at zero for 1e-30."""
    x = gradients() * size
    y = decoded(name, x)
    assert y.isfinite().all()
    assert error(y, x) < CODECS[name]
    assert error(y, x) == pytest.approx(error(decoded(name, gradients()), gradients()), rel=0.02)


@pytest.mark.parametrize("name", CODECS)
def test_tiles_of_mixed_sizes_keep_their_own_precision(name: str) -> None:
    """Rows from 1 down to a millionth of the largest, beside rows of zeros."""
    sizes = torch.tensor([1.0, 1e-2, 1e-4, 1e-6, 0.0]).repeat_interleave(64)
    x = gradients(len(sizes)) * sizes[None, :, None] * 1e-5
    y = decoded(name, x)
    assert not y[0, -64:].any()
    for start in range(0, 256, 64):
        rows = slice(start, start + 64)
        # Which tiles get four bits depends on the whole sample: some rows may get three alone.
        limit = 0.22 if name == "tah" else 1.1 * CODECS[name]
        assert error(y[0, rows], x[0, rows]) < limit


@pytest.mark.parametrize("name", CODECS)
def test_where_it_ends(name: str) -> None:
    """What is 2**40 times smaller than the tensor's largest element comes back as next to nothing."""
    x = gradients()
    x[:, 1] = gradients(1)[0] * 2.0**-40
    y = decoded(name, x)
    assert y.isfinite().all()
    assert y[:, 1].abs().max() <= 2.0**-33


@pytest.mark.parametrize("name", ["tah", "fixed-4", "fixed-8"])
@pytest.mark.parametrize("size", [1e-5, 1e-30])
def test_bf16_gradients_too(name: str, size: float) -> None:
    x = (gradients() * size).to(torch.bfloat16)
    assert error(decoded(name, x), x) < CODECS[name] + 0.003
