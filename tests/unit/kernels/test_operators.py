"""The custom operators' schemas are right; tests/gpu checks the same on a GPU.

All in one file: torch's checks bring in its compiler, which takes a process longer than the tests.
"""

import pytest
import torch

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
