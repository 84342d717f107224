"""Files and folders that a run file names."""

from pathlib import Path

from wire.errors import ConfigError


def expanded(place: str, key: str) -> Path:
    """`place`, which `key` names, with the folder that a `~` or `~user` before it stands for.

    Raises ConfigError.
    """
    try:
        return Path(place).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{key} {place!r}: this machine knows no home of that user; write the whole path, from / on"
        ) from None
