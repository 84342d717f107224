"""Work in slices, between which an event loop has its turn. Small work has one slice."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Slices = Generator[None, None, Result]
"""Work that yields between its slices and returns its result."""

SLICE = 200
"""Nodes or links of a slice: a few milliseconds of what a view or a scrape needs of each."""


def whole(work: Slices[Result]) -> Result:
    """The result, without turns in between."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


async def in_turns(work: Slices[Result]) -> Result:
    """The result; between slices other tasks have their turns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result
        await asyncio.sleep(0)


def ends_slice(number: int) -> bool:
    """Whether the work yields after item `number`, from 0."""
    return number % SLICE == SLICE - 1
