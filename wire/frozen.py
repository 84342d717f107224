"""Fast construction of frozen dataclasses. A thousand nodes report ten thousand per step."""

from typing import Any, TypeVar

T = TypeVar("T")
_set = object.__setattr__


def frozen(cls: type[T], fields: dict[str, Any]) -> T:
    """Create an instance of a frozen dataclass that has neither slots nor `__post_init__`.

    The generated `__init__` sets each field through `object.__setattr__`, which takes several times as long.

    Args:
        fields: all fields, including those with a default, in the order of their declaration.
    """
    instance = cls.__new__(cls)
    _set(instance, "__dict__", fields)
    return instance
