"""What a rank says when another is gone."""

from collections.abc import Iterator
from contextlib import contextmanager

from wire.errors import DeviceLostError


@contextmanager
def together() -> Iterator[None]:
    """What torch raises when another process is gone, as one line. Raises DeviceLostError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise DeviceLostError(
            f"the process of another of this node's devices is gone, and the node ends with it ({reason})"
        ) from error
