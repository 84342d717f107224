"""Small tensors for compute-sanitizer: guards that detect writes outside, and parsing its output."""

from typing import Any

import pytest
import torch

from scripts.checks import sanitizer
from scripts.checks.sanitizer import GUARD, POISON, Checks, GuardedScratch
from wire.codecs.trellis import TrellisCodec

SAID = {
    None: "sanitized-tah: 7 cases\nsanitized-tah: 20 checks, 0 failed\n",
    "memcheck": "========= COMPUTE-SANITIZER\nsanitized-tah: 7 cases\nsanitized-tah: 20 checks, 0 failed\n"
    "========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "sanitized-tah: 7 cases\nsanitized-tah: 20 checks, 0 failed\n"
    "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n",
}


def test_scratch_has_guards_on_its_device_alone() -> None:
    with GuardedScratch("cpu") as scratch:
        empty = torch.empty(3, 5, dtype=torch.int16)
        zeros = torch.zeros(7, dtype=torch.float64)
        like = torch.empty_like(zeros)
        torch.ones(4)
        torch.empty(9, device="meta")
    assert scratch.made == 3 and scratch.intact()
    assert empty.shape == (3, 5) and empty.dtype == torch.int16 and empty.data_ptr() % 16 == 0
    assert (empty.view(torch.uint8) == POISON).all() and (like.view(torch.uint8) == POISON).all()
    assert not zeros.any()
    empty.fill_(1)
    assert scratch.intact()
    empty.as_strided((1,), (1,), empty.storage_offset() + empty.numel())[0] = 1
    assert not scratch.intact()


def few() -> list[tuple[str, torch.Tensor, str]]:
    return [
        case for part in sanitizer.SANITIZED for case in sanitizer.cases_of(part) if case[1].numel() < 9000
    ]


def test_codecs_are_what_they_are_between_guards() -> None:
    checks = Checks()
    names = [name for name, _, _ in few()]
    assert {"odd", "outliers", "not contiguous", "zeros", "one element", "every other row"} <= set(names)
    assert {"tah", "fixed-4", "fixed-9", "fixed-3", "trellis-2"} <= {rate for *_, rate in few()}
    for name, x, rate in few():
        sanitizer.check_codec(checks, name, x, rate, device="cpu")
    assert checks.failed == []
    assert checks.cases == len(names) and checks.done == 7 * len(names)


def test_allocations_have_no_guards_that_hide_overruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sanitizer.OWN_ALLOCATIONS, "1")
    checks = Checks()
    name, x, rate = next(sanitizer.trellis_cases())
    sanitizer.check_codec(checks, name, x, rate, device="cpu")
    assert checks.failed == [] and checks.done == 5


@pytest.mark.parametrize("way", ["_pack", "_unpack"])
@pytest.mark.parametrize("side", [-1, 1])
def test_a_write_outside_is_found(way: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(TrellisCodec, way)

    def careless(self: TrellisCodec, *arguments: Any) -> Any:
        made = before(self, *arguments)
        to = arguments[1].view(-1).view(torch.uint8)
        place = -1 if side < 0 else to.numel()
        # The expectation is made by the same methods, in buffers without guards.
        if to.untyped_storage().nbytes() == to.numel() + 2 * GUARD:
            to.as_strided((1,), (1,), to.storage_offset() + place)[0] = 0
        return made

    checks = Checks()
    name, x, rate = next(case for case in sanitizer.trellis_cases() if case[0] == "odd")
    sanitizer.check_codec(checks, name, x, rate, device="cpu")
    ran = len([said for said in checks.failed if "wrote outside" in said and "scratch" not in said])
    assert ran == 0
    monkeypatch.setattr(TrellisCodec, way, careless)
    sanitizer.check_codec(checks, name, x, rate, device="cpu")
    said = [one for one in checks.failed if one.endswith("code wrote outside")]
    assert len(said) == 1 and ("encode" if way == "_pack" else "decode") in said[0]


@pytest.mark.parametrize(("tool", "errors"), [(None, None), ("memcheck", 0), ("racecheck", 2)])
def test_a_runs_output(tool: str | None, errors: int | None) -> None:
    row = sanitizer.outcome(tool, 0, SAID[tool])
    assert (row["cases"], row["checks"], row["failed"], row.get("errors")) == (7, 20, 0, errors)
    assert sanitizer.bad(row) == bool(errors) == ("last" in row)
