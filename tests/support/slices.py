"""Work in slices that is done at once."""

from typing import TypeVar

from node.analysis.slices import Slices

Result = TypeVar("Result")


def in_slices(result: Result) -> Slices[Result]:
    """This result, after a slice."""
    yield
    return result
