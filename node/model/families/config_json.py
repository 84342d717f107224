"""Reads the values of a Hugging Face `config.json`. This module imports no torch."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from node.config.schema import MOST_SIZE
from wire.errors import ConfigError


@dataclass(frozen=True)
class ConfigReader:
    """The values of a `config.json`. A null counts as an absent key."""

    config: Mapping[str, Any]
    where: str

    def refused(self, key: str, expected: str) -> ConfigError:
        value = shortened_value(self.config.get(key))
        return ConfigError(
            f"{self.where}: {key} is {value}, which cannot be trained here; expected {expected}"
        )

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refused(key, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.refused(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refused(key, "true or false")
        return value

    def object(self, key: str) -> "ConfigReader":
        """A reader of the object under a key; empty if there is none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.refused(key, "an object")
        return ConfigReader(value, f"{self.where}: {key}")

    def must_be(self, key: str, *allowed: Any) -> None:
        """Refuse a value that is present and not one of these.

        Raises:
            ConfigError: the value is refused.
        """
        if self.get(key, allowed[0]) not in allowed:
            raise self.refused(key, " or ".join(map(repr, allowed)))


def shortened_value(value: object) -> str:
    """A value as messages show it."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
