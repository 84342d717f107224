"""What surrounds the lanes when a `trellis` tensor is decoded on a GPU gives the CPU's bits under Triton's
interpreter."""

import pytest
import torch

from kernels.trellis import reference as trellis
from kernels.trellis.factors import Factors
from kernels.trellis.loops import matrices as matrix_loops
from tests.support.cases import each
from tests.support.interpreter import inside

pytestmark = inside

STEP_CODE = 20 * 1024 + 77


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int32)


def factors(rows: int, columns: int, rank: int) -> Factors:
    """As large as they may be for the rank."""
    limit = 31
    return Factors(
        6,
        integers(-limit, limit, rows, rank).to(torch.int8),
        integers(-limit, limit, columns, rank).to(torch.int8),
        integers(0, 255, rank),
        integers(0, 31, rows),
        integers(0, 31, columns),
        -19,
    )


@each(("rank", "salt"), [(0, None), (1, None), (7, 2**31 + 9), (32, None), (0, 0)])
@each(("rows", "columns"), [(1, 1), (3, 19), (16, 64), (37, 131)])
@each(
    ("dtype", "exponent"),
    [(torch.float32, 0), (torch.float32, -149), (torch.bfloat16, 60), (torch.float16, 3)],
)
def test_values_are_the_cpus(
    rank: int, salt: int | None, rows: int, columns: int, dtype: torch.dtype, exponent: int
) -> None:
    from kernels.trellis.triton import restore as triton_trellis_restore

    by = factors(rows, columns, rank) if rank else None
    n = integers(-(1 << 26), 1 << 26, rows * columns)
    n[::2] = integers(-90, 90, (rows * columns + 1) // 2)
    expected = torch.empty(1, rows, columns, dtype=dtype)
    matrix_loops.restore(trellis.reconstruct(n.clone(), STEP_CODE, by, salt), exponent, expected)
    guarded = torch.full((rows * columns + 64,), -7.0, dtype=dtype)
    out = guarded[32:-32].view(1, rows, columns)
    triton_trellis_restore.restore(n, STEP_CODE, by, exponent, out, salt)
    assert expected.isfinite().all() and (expected != 0).any()
    assert torch.equal(out, expected)
    assert (guarded[:32] == -7).all() and (guarded[-32:] == -7).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 19), (16, 256), (37, 300)])
def test_classes_are_the_cpus(rows: int, columns: int) -> None:
    from kernels.trellis.triton import restore as triton_trellis_restore

    row, column = integers(-70, 90, rows), integers(-70, 90, columns)
    assert torch.equal(triton_trellis_restore.classes(row, column), trellis.classes(row, column))
