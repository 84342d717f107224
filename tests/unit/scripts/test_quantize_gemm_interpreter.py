"""The experiment that packs inside a matrix product: its bits and products under Triton's interpreter.

In a process of their own, which `test_in_a_process_of_their_own` starts (`tests.support.interpreter`).
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.interpreter import Interpreted, inside, needs_triton, outside

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

pytestmark = [
    needs_triton,
    # Blocks of NaNs and beyond a tensor's end divide by zero and overflow in numpy, as on a GPU.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@outside
def test_in_a_process_of_their_own(interpreted: Interpreted) -> None:
    interpreted.passed(__file__)


@inside
@pytest.mark.parametrize("spread", [True, False], ids=["by all columns", "by the first column"])
@pytest.mark.parametrize("depth", [64, 128])
def test_stored_bits_are_the_references_and_products_near_fp64s(depth: int, spread: bool) -> None:
    from quantize_gemm import check, kernel

    config = kernel.Config(rows=32, columns=32, depth=depth, spread=spread, group=2)
    tried = list(check.cases("cpu", ((45, 384, 80), (33, 128, 16), (1, 256, 48))))
    # SwiGLU's two inputs, or a norm's in either dtype; again, but for the single row, not all finite.
    assert len(tried) == 15
    assert [line for case in tried for line in check.check(*case, config)] == []


@inside
def test_every_way_stores_the_same_bits() -> None:
    from quantize_gemm import kernel, ways

    for norm, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        layer = ways.Layer(model="", name="", width=256, columns=48, norm=norm, dtype=dtype)
        made = {
            name: way()
            for name, way in ways.ways(
                ways.sample(37, layer, "cpu"), kernel.Config(rows=32, columns=32)
            ).items()
        }
        product, *stored = made["producer"]
        assert len(stored) == (1 if norm else 2)
        for name, (found, *packed) in made.items():
            assert (found.float() - product.float()).norm() < 5e-3 * product.float().norm(), name
            if name in ("separate", "fused"):
                assert all(map(torch.equal, packed, stored)) and len(packed) == len(stored), name
            else:
                assert name == "producer" or not packed


@inside
def test_a_wrong_bit_and_a_wrong_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantize_gemm import check, kernel

    run: Callable[..., None] = kernel.quantize_gemm

    def spoil(*arguments: object, **options: object) -> None:
        run(*arguments, **options)
        out, packed = arguments[4], arguments[5]
        assert isinstance(out, torch.Tensor) and isinstance(packed, tuple)
        out[3] *= 1.1
        packed[0][100] ^= 1

    monkeypatch.setattr(check, "quantize_gemm", spoil)
    what, inputs, finite = next(check.cases("cpu", ((45, 384, 80),)))
    bits, product = check.check(what, inputs, finite, kernel.Config(rows=32, columns=32))
    assert "1 of " in bits and "stored bytes of input 0 differ" in bits
    assert "of a row 0.1" in product


@inside
@pytest.mark.parametrize(
    ("width", "columns", "depth", "said"),
    [
        (200, 32, 64, "must be a multiple of 128"),
        (256, 33, 64, "columns of 16"),
        (256, 32, 32, "the depth 64 or 128"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(width: int, columns: int, depth: int, said: str) -> None:
    from quantize_gemm import kernel

    x, weight = torch.zeros(4, width).bfloat16(), torch.zeros(columns, width).bfloat16()
    out = torch.zeros(4, columns).bfloat16()
    with pytest.raises(ValueError, match=said):
        kernel.quantize_gemm(x, x, None, weight, out, (), config=kernel.Config(depth=depth))
