"""The custom operators' schemas are right; tests/gpu checks the same on a GPU.

All in one file: torch's checks bring in its compiler, which takes a process longer than the tests.
"""

import pytest
import torch

from kernels.blockfloat import ops as blockfloat_ops
from kernels.blockfloat import reference as blockfloat
from kernels.fixed import ops as fixed_ops
from tests.support.operators import check_operators


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("tah", torch.float32), ("tah", torch.float16), ("fixed-2", torch.bfloat16), ("fixed-8", torch.float32)],
    ids=str,
)
def test_operators_say_what_they_do(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 10, 128, generator=torch.Generator().manual_seed(0))
    check_operators(name, x.to(dtype))


@pytest.mark.parametrize("bits", [4, 16])
def test_operators_of_blockfloat_say_what_they_do(bits: int) -> None:
    x, weight = torch.randn(3, 200), torch.randn(200)
    packed = blockfloat.pack(x, bits)
    torch.library.opcheck(blockfloat_ops.store, (x, bits))
    torch.library.opcheck(blockfloat_ops.restore, (packed, [3, 200], bits, torch.bfloat16))
    if bits == 16:
        return
    for bias in (None, weight):
        torch.library.opcheck(blockfloat_ops.norm_store, (x, weight, bias, 1e-5, bits, torch.bfloat16))
        torch.library.opcheck(
            blockfloat_ops.norm_from_stored, (packed, [3, 200], weight, bias, 1e-5, bits, torch.float32)
        )
        torch.library.opcheck(blockfloat_ops.norm_backward, (x, packed, x.clone(), weight, bias, 1e-5, bits))
    for up, second in ((None, None), (x, packed)):
        torch.library.opcheck(blockfloat_ops.ffn_store, (x, up, bits))
        torch.library.opcheck(blockfloat_ops.ffn_backward, (x.clone(), packed, second, bits))


def test_an_operator_that_writes_to_what_it_should_only_read_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check works: it finds an operator whose schema hides that it changes its argument."""
    from torch.testing._internal.optests import OpCheckError  # brings in all of torch's compiler

    def spoils(x: torch.Tensor, *_: object) -> None:
        x.zero_()

    with torch.library._scoped_library("thinwire_test", "FRAGMENT") as library:
        library.define(
            "spoils(Tensor x, Tensor scales, Tensor planes, Tensor exponent, float constant) -> ()"
        )
        library.impl("spoils", spoils, "CPU")
        library.impl("spoils", lambda *_: None, "Meta")
        monkeypatch.setattr(fixed_ops, "encode", torch.ops.thinwire_test.spoils.default)
        with pytest.raises(OpCheckError, match="mutat"):
            check_operators("fixed-8", torch.ones(4, 10, 128))
