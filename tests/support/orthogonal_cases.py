"""Products of `kernels.orthogonal` on any device, on whole numbers, whose sums are exact in every order."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.orthogonal.reference import orthogonal as reference

SHAPES = ((1, 1), (3, 40), (40, 3), (130, 129), (129, 300), (300, 64), (128, 256))
GUARD = 77.0


def whole_numbers(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """From -2 to 2: every product of these cases is exact in bfloat16, and every sum in float32."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=random).to(device, dtype)


def guarded(like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory of this shape and these strides amid poison, and all of it."""
    everything = like.new_full((like.numel() + 2 * 512,), GUARD)
    return everything[512:-512].as_strided(like.shape, like.stride(), 512), everything


def untouched(everything: Tensor) -> bool:
    return bool((everything[:512] == GUARD).all() and (everything[-512:] == GUARD).all())


def laid(shape: tuple[int, int], count: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[count, shorter, longer], a view of the matrices as they lie."""
    x = whole_numbers(count, *shape, seed=seed, device=device, dtype=dtype)
    return x.mT if shape[0] > shape[1] else x


def check_symmetric(
    symmetric: Callable[..., None], shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    x = laid(shape, 3, 1, device, dtype)
    exact = x.double() @ x.double().mT
    into, everything = guarded(x.new_empty(exact.shape))
    symmetric(x, into)
    assert torch.equal(into, exact.to(dtype)) and untouched(everything)
    a = whole_numbers(3, *exact.shape[1:], seed=2, device=device, dtype=dtype)
    a = (a + a.mT).clamp(-2, 2)
    wanted = 0.5 * (a.double() @ a.double()) - 3 * a.double()
    symmetric(a, into, beta=-3.0, alpha=0.5)
    assert torch.equal(into, wanted.float().to(dtype)) and untouched(everything)
    assert torch.equal(into, into.mT)


def check_product(
    product: Callable[..., None], shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    x = laid(shape, 3, 3, device, dtype)
    short = min(shape)
    polynomial = whole_numbers(3, short, short, seed=4, device=device, dtype=dtype)
    wanted = polynomial.double() @ x.double() + 2 * x.double()
    into, everything = guarded(x)
    product(polynomial, x, into, beta=2.0)
    assert torch.equal(into, wanted.float().to(dtype)) and untouched(everything)


def check_iteration(
    orthogonal: Callable[..., Tensor], shape: tuple[int, int], device: torch.device, tolerance: float
) -> None:
    """Near the reference in float32; the same bits in any company; and of tiny, huge and empty matrices."""
    random = torch.Generator().manual_seed(5)
    matrices = [scale * torch.randn(shape, generator=random) for scale in (1.0, 1e-12, 1e12)]
    matrices = [matrix.to(device) for matrix in (*matrices, torch.zeros(shape))]
    together = orthogonal(matrices)
    for number, matrix in enumerate(matrices):
        alone = orthogonal([matrix])
        assert torch.equal(alone[0], together[number])
        wanted = reference([matrix])[0]
        assert (alone[0].float() - wanted).norm() <= tolerance * min(shape) ** 0.5
