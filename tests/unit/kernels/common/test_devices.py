"""The table of devices: what each kind can do, and names that it does not know."""

import pytest
import torch

from kernels.common import devices, dispatch
from kernels.common.devices import Room, of_arithmetic, of_target


@pytest.mark.parametrize(
    ("arch", "able"),
    [
        (61, set()),
        (75, {"kernels"}),
        (80, {"kernels", "bfloat16"}),
        (86, {"kernels", "bfloat16"}),
        (87, {"kernels", "bfloat16"}),
        (89, {"kernels", "bfloat16", "fp8_products", "fp8_conversions"}),
        (90, {"kernels", "bfloat16", "fp8_products", "fp8_conversions"}),
        (103, {"kernels", "bfloat16", "fp8_products", "fp8_conversions"}),
        (121, {"kernels", "bfloat16", "fp8_products", "fp8_conversions"}),
        ("gfx942:sramecc+:xnack-", {"kernels", "bfloat16"}),
        ("gfx906", set()),
        ("gfx1030", set()),
        ("gfx1101", {"kernels", "bfloat16"}),
        ("gfx1201", {"kernels", "bfloat16"}),
    ],
)
def test_what_a_gpu_can_do(arch: int | str, able: set[str]) -> None:
    kind = of_target(arch)
    asked = ("kernels", "bfloat16", "fp8_products", "fp8_conversions")
    assert {name for name in asked if getattr(kind, name)} == able
    large = arch in (90, 103)
    assert kind.room is (Room.LARGE if large else Room.SMALL if "bfloat16" in able else Room.NONE)
    assert kind.warps == (16 if kind.name == "gfx942" else 32)
    assert of_arithmetic(f"torch 2.13.0, {kind.name}") == kind


@pytest.mark.parametrize("text", ["", "torch 2.13.0", "sm_", "sm_9", "sm_9000000", "sm_9a", "4 threads"])
def test_a_strangers_text_is_a_cpu_if_in_doubt(text: str) -> None:
    assert of_arithmetic(text) == devices.CPU


def test_kernels_are_withdrawn_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert not dispatch.has_kernels(device)
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    monkeypatch.setattr(dispatch, "_withdrawn", set[str]())
    dispatch.withdraw("tah")
    assert [dispatch.has_kernels(device, part) for part in ("tah", "fixed", "")] == [False, True, True]
