"""What a rank says when another is gone."""

from collections.abc import Iterator
from contextlib import contextmanager

from node.stage.out_of_memory import ran_out
from wire.errors import DeviceLostError


@contextmanager
def together() -> Iterator[None]:
    """What torch raises when another process is gone, as one line. Raises DeviceLostError.

    Memory that does not suffice is this process's own trouble, and raised as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise
        reason = str(error).partition("\n")[0][:200]
        raise DeviceLostError(
            f"the process of another of this node's devices is gone, and the node ends with it ({reason})"
        ) from error
