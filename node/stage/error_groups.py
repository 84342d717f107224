"""What went wrong first in a task group, to be raised in the group's place."""

from typing import TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


def first_error(errors: BaseExceptionGroup[ErrorT]) -> ErrorT:
    """The first leaf of a group."""
    inner = errors.exceptions[0]
    return first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner
