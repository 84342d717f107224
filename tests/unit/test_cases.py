"""Cases of one test (`tests.support.cases`): all run, each by itself, and those that fail are named."""

import asyncio
import inspect
from pathlib import Path

import pytest
import torch

from tests.support.cases import each


def test_every_combination_runs_and_those_that_fail_are_named() -> None:
    seen: list[tuple[str, int, int]] = []

    @each("name", ["a", "b"])
    @each(("low", "high"), [(1, 2), (3, 4), (5, 6)])
    def test(name: str, low: int, high: int) -> None:
        seen.append((name, low, high))
        assert low < 3 or name == "b", f"{low} is too much"

    with pytest.raises(AssertionError, match="3 is too much") as caught:
        test()
    assert seen == [(name, low, low + 1) for name in "ab" for low in (1, 3, 5)]
    (note,) = caught.value.__notes__
    assert note.splitlines() == [
        "2 of 6 cases failed:",
        "  name='a', low=3, high=4",
        "  name='a', low=5, high=6",
    ]


def test_a_case_that_raises_nothing_where_it_should_fails() -> None:
    @each("error", [ValueError, KeyError])
    def test(error: type[Exception]) -> None:
        with pytest.raises(error):
            raise_a_key_error()

    with pytest.raises(KeyError) as caught:
        test()
    assert caught.value.__notes__ == ["1 of 2 cases failed:\n  error=<class 'ValueError'>"]


def raise_a_key_error() -> None:
    raise KeyError


def test_no_case_runs_after_one_that_fails_as_a_timeout_does() -> None:
    seen: list[int] = []

    @each("x", [1, 2])
    def test(x: int) -> None:
        seen.append(x)
        pytest.fail("Timeout")

    with pytest.raises(pytest.fail.Exception) as caught:
        test()
    assert seen == [1] and caught.value.__notes__ == ["1 of 2 cases failed:\n  x=1"]


@each("x", [1, 2])
def test_a_case_has_its_own_patches_folder_and_random_numbers(
    x: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert VALUES == {} and list(tmp_path.iterdir()) == []
    monkeypatch.setitem(VALUES, "x", x)
    (tmp_path / "file").touch()
    assert torch.initial_seed() == 0
    torch.rand(1)
    torch.manual_seed(5)


VALUES: dict[str, int] = {}


@each("x", [1, 2])
async def test_cases_may_wait(x: int) -> None:
    await asyncio.sleep(0)
    assert x in (1, 2)


def test_what_asks_for_no_case_or_skips_is_refused() -> None:
    def function(x: int) -> None:
        pytest.skip("not here")

    with pytest.raises(AssertionError, match="function has no case"):
        each("x", [])(function)
    with pytest.raises(AssertionError, match="function lacks an argument"):
        each("y", [1])(function)
    with pytest.raises(AssertionError, match="a case must not skip: x=1"):
        each("x", [1])(function)()
    assert list(inspect.signature(each("x", [1])(function)).parameters) == []
