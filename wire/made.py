"""Constructs frozen dataclasses fast: the reports and costs of a thousand nodes are ten thousand objects per
step."""

from typing import Any, TypeVar

T = TypeVar("T")
_set = object.__setattr__


def made(cls: type[T], fields: dict[str, Any]) -> T:
    """An object of a frozen dataclass without slots and without `__post_init__`.

    Its own `__init__` sets field after field through `object.__setattr__`, which takes several times as long.

    Args:
        fields: all of them, also those that have a default, in the order in which the class declares them.
    """
    one = cls.__new__(cls)
    _set(one, "__dict__", fields)
    return one
