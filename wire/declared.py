"""Declares what the fields of a message may hold, next to the fields themselves.

A message is a frozen dataclass. Each field has a type, and `Annotated` adds its limits. From these
declarations `wire.messages_proto` derives the conversion to and from protobuf, and the tests derive examples
and attacks. So a new field needs one line in the dataclass and one in the `.proto` file.

A message may have a method `contradiction() -> str` that describes how its fields contradict each other; it
returns "" if they do not.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

LONGEST_SECONDS = 1e9
"""The longest time accepted, about 30 years."""
MOST = 10**18
"""The limit of other measurements, such as bytes or operations per second; well below 2**63."""
LONGEST_LINE = 1000
"""The most characters of a text for people; longer text is cut."""


@dataclass(frozen=True)
class Within:
    """A number from `least` to `most`, both included."""

    least: float
    most: float
    nan: bool = False
    """Whether NaN is allowed."""

    def allows(self, value: float) -> bool:
        return self.least <= value <= self.most or (self.nan and value != value)


@dataclass(frozen=True)
class Line:
    """A line of text. It is cut to length, and unprintable characters become spaces."""

    most: int = LONGEST_LINE
    """The most characters."""

    def clean(self) -> Callable[[str], str]:
        """The function that turns text into such a line."""
        most = self.most
        return lambda text: _kept_line(text[:most])


@dataclass(frozen=True)
class Size:
    """Exactly this many bytes. A field of type `str` holds them in hex."""

    bytes: int
    or_none: bool = False
    """Whether the field may also be empty."""


@dataclass(frozen=True)
class AtMost:
    """At most this many entries of a tuple or a mapping."""

    entries: int


@dataclass(frozen=True)
class Parsed:
    """The field holds `parse(value)` of the received value. `parse` may raise ValueError or ConfigError."""

    parse: Callable[[Any], Any]


@dataclass(frozen=True)
class Present:
    """A nested message that must be present. Without this mark, a missing message counts as an empty one."""


class Declared(NamedTuple):
    """The declaration of a field, or of the entries of a tuple or a mapping."""

    kind: Any
    """Its type: a class, `tuple[X, ...]` or `Mapping[K, V]`."""
    marks: tuple[Any, ...] = ()
    optional: bool = False
    """Whether it may be None."""

    def mark(self, kind: type) -> Any:
        """Its mark of this class, or None."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    @property
    def origin(self) -> Any:
        """`tuple` or `Mapping` for a collection, else None."""
        return get_origin(self.kind)

    @property
    def is_record(self) -> bool:
        """Whether it is a dataclass or a NamedTuple."""
        return hasattr(self.kind, "_fields") or hasattr(self.kind, "__dataclass_fields__")

    @property
    def entries(self) -> tuple["Declared", ...]:
        """The declarations of a collection's entries; for a mapping, of the keys and then of the values."""
        return tuple(declared(argument) for argument in get_args(self.kind) if argument is not Ellipsis)


def declared(hint: Any) -> Declared:
    """The declaration that an annotation contains."""
    marks: tuple[Any, ...] = ()
    optional = False
    while True:
        if get_origin(hint) is Annotated:
            marks += hint.__metadata__
            hint = hint.__origin__
        elif get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
            (hint,) = (argument for argument in get_args(hint) if argument is not NoneType)
            optional = True
        else:
            return Declared(hint, marks, optional)


@cache
def declared_fields(kind: type) -> dict[str, Declared]:
    """The fields of a dataclass or a NamedTuple, by name."""
    hints = get_type_hints(kind, include_extras=True)
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in fields(kind)]
    return {name: declared(hints[name]) for name in names}


def line(text: str) -> str:
    """`text` as one line of at most `LONGEST_LINE` printable characters."""
    return _kept_line(text[:LONGEST_LINE])


@lru_cache(maxsize=1024)
def _kept_line(text: str) -> str:
    """`text` with unprintable characters replaced by spaces. It is cached because texts repeat."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


Seconds = Annotated[float, Within(0.0, LONGEST_SECONDS)]
"""A measured time."""
Amount = Annotated[float, Within(0.0, MOST)]
"""A rate, a factor or another measurement that is not negative."""
Count = Annotated[int, Within(0, MOST)]
"""A measured whole number."""
Finite = Annotated[float, Within(-sys.float_info.max, sys.float_info.max)]
"""A number of either sign."""
Squared = Annotated[float, Within(0.0, float("inf"), nan=True)]
"""A sum of squares that may have overflowed: infinite or NaN, never negative."""
Text = Annotated[str, Line()]
