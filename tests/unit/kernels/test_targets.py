"""Kernels for GPUs that are not there: all are checked, each says whether it fuses, and some are compiled.

`python -m scripts.checks.targets` compiles all of them for every target.
"""

from typing import Any

import pytest

from kernels.common import devices
from tests.support.interpreter import INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["sm_75", "sm_90", "gfx942"])
def test_launches_say_whether_they_fuse_and_fit_the_device(target: str) -> None:
    """Of all cases, which together launch every kernel that there is."""
    from scripts.checks.targets import CASES, instead_of_launching, launched_kernels, name_of

    kind, seen, silent = devices.TABLE[target], set[str](), set[str]()

    def take(_launch: Any, kernel: Any, _args: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.add(name_of(kernel))
        assert named.get("num_warps", 4) <= kind.warps
        if "enable_fp_fusion" not in named:
            silent.add(name_of(kernel))

    with instead_of_launching(kind, take):
        for case in CASES.values():
            case()
    assert silent == set()
    assert launched_kernels() == seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["sm_75", "sm_89", "gfx942"])
def test_kernels_are_compiled_and_assembled_without_the_device(target: str) -> None:
    """FP8 gradients, whose conversions are written out below sm_89 and on AMD GPUs."""
    from scripts.checks.targets import compiled

    variants = compiled(target, "fp8 bfloat16")
    assert {variant.kernel for variant in variants} == {
        f"fp8.triton.{name}" for name in ("_accumulate", "_sum", "_momentum", "_adamw")
    }
    assert [variant.faults for variant in variants if variant.faults] == []
    assert all(0 < variant.registers <= 255 for variant in variants)


def test_what_does_not_fit_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from scripts.checks import targets

    small = replace(devices.TABLE["sm_75"], shared_bytes=0, lanes=512)
    monkeypatch.setitem(devices.TABLE, "sm_75", small)
    monkeypatch.setattr(targets, "target_of", lambda kind: targets.GPUTarget("cuda", 75, 32))
    (variant,) = targets.compiled("sm_75", "orthogonal 48 16")[:1]
    assert len(variant.faults) >= 2
