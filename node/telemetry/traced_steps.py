"""Which steps are traced: `off`, `all`, or `a:b`: the first and the last one, counted from 1 as people do."""

import re
from dataclasses import dataclass
from typing import Self

from wire.errors import ConfigError


@dataclass(frozen=True)
class TracedSteps:
    """`step in traced` is asked with steps that count from 0, as messages have them. Empty is false."""

    first: int
    last: int | None
    """None: no end."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigError, one line that says what would do."""
        if text == "off":
            return cls(0, 0)
        if text == "all":
            return cls(1, None)
        found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(
                f"{text!r} names no steps: write off, all, or the first and last step as in 3:5"
            )
        return cls(int(found[1]), int(found[2]))

    def __contains__(self, step: int) -> bool:
        return self.first <= step + 1 and (self.last is None or step + 1 <= self.last)

    def __bool__(self) -> bool:
        return self.last is None or self.last >= 1
