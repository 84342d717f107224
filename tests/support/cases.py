"""Many cases in one test: to collect and report a test takes pytest longer than most cases compute.

    @each("name", codec_names())
    @each(("rows", "columns"), SHAPES)
    def test_sizes(name: str, rows: int, columns: int) -> None: ...

The function runs for every combination, as with `pytest.mark.parametrize`, but all of them are one test.
Cases also run after one that raised. The test fails as the first of these did, with a note that names them.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

Test = Callable[..., Any]
Case = Mapping[str, Any]
_CASES = "_cases"
_MOST_NAMED = 20


def each(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for each of `values`: of the argument `names`, or tuples of values of several arguments.

    Each case begins with torch's random numbers at seed 0, with a `tmp_path` of its own, and what it sets
    through `monkeypatch` is undone at its end. It shares other fixtures with the other cases, and must leave
    them as they were. A case must not skip.
    """
    rows = [
        {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True)) for value in values
    ]

    def decorate(test: Test) -> Test:
        function, others = getattr(test, _CASES, (test, [{}]))
        return _one_test(test, function, [{**row, **other} for row in rows for other in others])

    return decorate


def _one_test(test: Test, function: Test, cases: Sequence[Case]) -> Test:
    assert cases, f"{function.__name__} has no case"
    signature = inspect.signature(function)
    assert cases[0].keys() <= signature.parameters.keys(), f"{function.__name__} lacks an argument"

    def run(**fixtures: Any) -> None:
        failures = _Failures(cases)
        for number, case in enumerate(cases):
            with failures.of(number), _own(fixtures, number) as own:
                function(**case, **own)
        failures.tell()

    async def run_async(**fixtures: Any) -> None:
        failures = _Failures(cases)
        for number, case in enumerate(cases):
            with failures.of(number), _own(fixtures, number) as own:
                await function(**case, **own)
        failures.tell()

    together: Any = run_async if inspect.iscoroutinefunction(function) else run
    functools.update_wrapper(together, test)
    fixtures = [parameter for name, parameter in signature.parameters.items() if name not in cases[0]]
    together.__signature__ = signature.replace(parameters=fixtures)
    setattr(together, _CASES, (function, cases))
    return together  # type: ignore[no-any-return]


class _Failures:
    """The first failure of a test's cases, and the names of all that failed."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases
        self._first: BaseException | None = None
        self._failed: list[str] = []

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        try:
            yield
        except pytest.skip.Exception as skipped:
            raise AssertionError(f"a case must not skip: {_named(self._cases[number])}") from skipped
        except Exception as error:
            self._note(number, error)
        except pytest.fail.Exception as error:  # a timeout's, too: nothing would bound the next case
            self._note(number, error)
            self.tell()

    def _note(self, number: int, error: BaseException) -> None:
        self._first = self._first or error
        self._failed.append(_named(self._cases[number]))

    def tell(self) -> None:
        """Raise the first failure, if there was one."""
        if self._first is not None:
            named = "\n  ".join(self._failed[:_MOST_NAMED])
            self._first.add_note(f"{len(self._failed)} of {len(self._cases)} cases failed:\n  {named}")
            raise self._first


def seed() -> None:
    """Seed 0 for torch's random numbers. `torch.manual_seed` formats the stack for every kind of device that
    is not there, in a millisecond."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@contextmanager
def _own(fixtures: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures for one case."""
    seed()
    own = dict(fixtures)
    if isinstance(folder := own.get("tmp_path"), Path):
        own["tmp_path"] = folder / str(number)
        own["tmp_path"].mkdir()
    with pytest.MonkeyPatch.context() as patches:
        if "monkeypatch" in own:
            own["monkeypatch"] = patches
        yield own


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def _named(case: Case) -> str:
    return ", ".join(f"{name}={_SHORT.repr(value)}" for name, value in case.items())
