"""The all-reduce of e4m3 gradients, over processes and gloo, against a sum in one process."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernels.fp8.ops import sum_gradients
from kernels.fp8.reference import Fp8Gradient, blocks, pack_gradient, unpack_gradient
from node.stage.fp8_all_reduce import _cut
from tests.support.device_groups import run_ranks
from tests.support.fault_prefork import Prefork
from tests.support.fp8_cases import GRADIENT_SIZES, gradients

SCRIPT = """
from safetensors.torch import save_file
from node.stage.fp8_all_reduce import Fp8AllReduce
from tests.support.fp8_cases import gradients

mine = gradients(RANK)
reduce = Fp8AllReduce(mine, bucket_blocks={bucket})
for again in range(2):  # buffers are used again
    for gradient, fresh in zip(mine, gradients(RANK)):
        gradient.codes.copy_(fresh.codes)
        gradient.exponents.copy_(fresh.exponents)
    for gradient in mine[:: 2] if again else ():
        reduce.complete(gradient)
    reduce.finish()
result = {{f"codes.{{i}}": g.codes for i, g in enumerate(mine)}}
result |= {{f"exponents.{{i}}": g.exponents for i, g in enumerate(mine)}}
save_file(result, FOLDER / f"{{RANK}}.safetensors")
dist.destroy_process_group()
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ranks", "bucket"), [(1, 7), (2, 7), (3, 1), (4, 1 << 18)])
def test_every_rank_ends_with_the_sum_in_the_order_of_ranks(
    ranks: int, bucket: int, tmp_path: Path, prefork: Prefork
) -> None:
    run_ranks(SCRIPT.format(bucket=bucket), ranks, tmp_path, prefork.popen)
    everybody = [gradients(rank) for rank in range(ranks)]
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(ranks)]
    for index, size in enumerate(GRADIENT_SIZES):
        codes = torch.stack([gradient[index].codes for gradient in everybody])
        exponents = torch.stack([gradient[index].exponents for gradient in everybody])
        expected = Fp8Gradient(
            torch.full((size,), 0xA5, dtype=torch.uint8), torch.full((blocks(size),), 9, dtype=torch.int8)
        )
        sum_gradients(codes, exponents, expected)
        for result in found:
            assert torch.equal(result[f"codes.{index}"], expected.codes)
            assert torch.equal(result[f"exponents.{index}"], expected.exponents)


ABORTED = """
from safetensors.torch import save_file
from kernels.fp8.reference import Fp8Gradient, pack_gradient
from node.stage.fp8_all_reduce import Fp8AllReduce

def values(attempt, index, size):
    generator = torch.Generator().manual_seed(1000 * attempt + 100 * RANK + index)
    return torch.randn(size, generator=generator)

mine = [Fp8Gradient.zeros(size, torch.device("cpu")) for size in {sizes}]
reduce = Fp8AllReduce(mine, bucket_blocks=7)
for attempt, told in enumerate({told}):
    reduce.reset()
    for index, gradient in enumerate(mine):
        pack_gradient(values(attempt, index, gradient.codes.numel()), gradient)
    for gradient in mine[:told]:
        reduce.complete(gradient)
reduce.finish()
result = {{f"codes.{{i}}": g.codes for i, g in enumerate(mine)}}
result |= {{f"exponents.{{i}}": g.exponents for i, g in enumerate(mine)}}
save_file(result, FOLDER / f"{{RANK}}.safetensors")
dist.destroy_process_group()
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("told", [(6, 6), (6, 3, 6), (2, 0)], ids=str)
def test_tensors_of_aborted_steps_enter_no_sum(
    told: tuple[int, ...], tmp_path: Path, prefork: Prefork
) -> None:
    run_ranks(ABORTED.format(sizes=GRADIENT_SIZES, told=told), 2, tmp_path, prefork.popen)
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    for index, size in enumerate(GRADIENT_SIZES):
        packed = [Fp8Gradient.zeros(size, torch.device("cpu")) for _ in range(2)]
        for rank, gradient in enumerate(packed):
            generator = torch.Generator().manual_seed(1000 * (len(told) - 1) + 100 * rank + index)
            pack_gradient(torch.randn(size, generator=generator), gradient)
        expected = Fp8Gradient.zeros(size, torch.device("cpu"))
        codes, exponents = (
            torch.stack([getattr(gradient, part) for gradient in packed]) for part in ("codes", "exponents")
        )
        sum_gradients(codes, exponents, expected)
        for result in found:
            assert torch.equal(result[f"codes.{index}"], expected.codes)
            assert torch.equal(result[f"exponents.{index}"], expected.exponents)


def test_the_sum_is_rounded_once_for_any_number_of_ranks() -> None:
    """Adding in e4m3 at every hop of a ring would round, and might overflow, at each."""
    generator = torch.Generator().manual_seed(0)
    ranks, size = 8, 1 << 15
    values = torch.randn(ranks, size, generator=generator)
    packed = [Fp8Gradient.zeros(size, torch.device("cpu")) for _ in range(ranks)]
    for gradient, addend in zip(packed, values, strict=True):
        pack_gradient(addend, gradient)
    given = torch.stack([unpack_gradient(gradient) for gradient in packed])
    into = Fp8Gradient.zeros(size, torch.device("cpu"))
    sum_gradients(torch.stack([g.codes for g in packed]), torch.stack([g.exponents for g in packed]), into)
    truth = given.double().sum(0)
    error = (unpack_gradient(into) - truth).norm() / truth.norm()
    hops = Fp8Gradient.zeros(size, torch.device("cpu"))
    for addend in given:
        pack_gradient(unpack_gradient(hops) + addend, hops)
    of_a_ring = (unpack_gradient(hops) - truth).norm() / truth.norm()
    assert error < 0.03 and error < 0.6 * of_a_ring


def test_buckets_hold_every_block_once_in_order() -> None:
    some = gradients(0)
    for most in (1, 3, 40, 1000):
        buckets = _cut(some, most)
        assert all(0 < sum(end - start for _, start, end in bucket) <= most for bucket in buckets)
        assert all(sum(end - start for _, start, end in bucket) == most for bucket in buckets[:-1])
        seen = [
            (id(gradient), block)
            for gradient, start, end in itertools.chain.from_iterable(buckets)
            for block in range(start, end)
        ]
        expected = [
            (id(gradient), block) for gradient in some for block in range(blocks(gradient.codes.numel()))
        ]
        assert seen == expected
