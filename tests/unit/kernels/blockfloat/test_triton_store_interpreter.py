"""The kernels that store tensors give the reference's bits under Triton's interpreter, on a CPU."""

from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.blockfloat import layers as blockfloat_layers
from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import APART, WIDTHS
from tests.support.interpreter import inside

pytestmark = [
    *inside,
    # Blocks of NaNs and beyond a tensor's end divide by zero and overflow in numpy, as on a GPU.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    mixed = normal(40, 256)
    mixed[3], mixed[6, 130], mixed[0, 5] = 0, 300, -0.0
    mixed[4] *= 1e-33
    mixed[5] *= 1e30
    odd = normal(6, 300)
    odd[0, 3], odd[1, 200] = torch.nan, torch.inf
    odd[2] = 1e38
    return {
        "mixed": mixed,
        "bf16": normal(3, 5, 130).bfloat16(),
        "subnormal bf16": (normal(3, 70) * 1e-38).bfloat16(),
        "fp16": normal(7, 200).half(),
        "narrow": normal(9, 1),
        "vector": normal(1000),
        "columns": normal(30, 512)[:, 64:200],
        "ties": torch.randint(-12, 13, (20, 128), generator=generator).float(),
        "not finite": odd,
    }


def same(found: Tensor, wanted: Tensor) -> bool:
    """Bit for bit, but that any NaN is as good as another."""
    size = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
    equal = found.view(size) == wanted.view(size)
    return found.dtype == wanted.dtype and bool((equal | (found.isnan() & wanted.isnan())).all())


def near(found: Tensor, wanted: Tensor) -> bool:
    """To rounding in the dtype."""
    tolerance = 2e-6 if wanted.dtype == torch.float32 else 6e-3
    close = (found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()
    return found.shape == wanted.shape and found.dtype == wanted.dtype and bool(close)


@pytest.mark.parametrize(
    ("which", "bits"),
    [
        *product(("mixed",), WIDTHS),
        *product(("ties",), WIDTHS[::2]),
        *product(("mixed", "bf16", "subnormal bf16", "columns", "vector", "not finite"), (4 + APART,)),
        ("fp16", 3 + APART),
        *product(("not finite",), (width for width in WIDTHS if width < 16)),  # bf16's NaNs have many forms
        # Of the others each width has one.
        *zip([*inputs()][1:7], WIDTHS, strict=True),
    ],
)
def test_stored_bits_are_the_references(which: str, bits: int) -> None:
    from kernels.blockfloat.triton import store as triton_store

    x = inputs()[which]
    packed = blockfloat.pack(x, bits)
    assert torch.equal(triton_store.pack(x, bits, blocks=16), packed)
    for dtype in (torch.float32, torch.bfloat16):
        found = triton_store.unpack(packed, x.shape, bits, dtype, blocks=4)
        assert same(found, blockfloat.unpack(packed, x.shape, bits, dtype))


@pytest.mark.parametrize(
    ("width", "biased", "bits", "dtype"),
    [
        (200, False, 4, torch.float32),
        (200, True, 16, torch.bfloat16),
        (256, True, 4, torch.float32),
        (256, False, 16, torch.float32),
        (200, True, 4, torch.bfloat16),
        (200, True, 4 + APART, torch.float32),
        (256, False, 4 + APART, torch.bfloat16),
    ],
    ids=str,
)
def test_norms_are_the_references(width: int, biased: bool, bits: int, dtype: torch.dtype) -> None:
    from kernels.blockfloat.triton import norm as triton_store_norm

    generator = torch.Generator().manual_seed(width)
    x, grad, residual = (torch.randn(2, 5, width, generator=generator) + 0.5 for _ in range(3))
    weight = torch.randn(width, generator=generator)
    bias = torch.randn(width, generator=generator) if biased else None
    normed, packed = triton_store_norm.norm_store(x, weight, bias, 1e-5, bits, dtype)
    wanted, expected = blockfloat_layers.norm_store(x, weight, bias, 1e-5, bits, dtype)
    assert torch.equal(packed, expected) and near(normed, wanted)
    again = triton_store_norm.norm_from_stored(packed, x.shape, weight, bias, 1e-5, bits, dtype)
    assert near(again, blockfloat_layers.norm_from_stored(packed, x.shape, weight, bias, 1e-5, bits, dtype))
    inputs_of_backward = (grad.to(dtype), packed, residual, weight, bias, 1e-5, bits)
    # Fewer programs than rows, so that each sums several.
    found = triton_store_norm.norm_backward(*inputs_of_backward, programs=3)
    for part, exact in zip(found, blockfloat_layers.norm_backward(*inputs_of_backward), strict=True):
        assert near(part, exact)
