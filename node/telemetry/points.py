"""Points in a run at which a test's process can make something happen, by setting `hook` or `frame_filter`.

Both are None in production. Passing a point then does nothing.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wire.link_state import FrameFilter

ANY = -1
"""Any stage or step."""


class Phase(StrEnum):
    """The phase of a run. Most phases have a point at the node and one at the coordinator."""

    RESUMING = "resuming"
    """The snapshots are about to be read. Only at a coordinator that resumes a run."""
    ENROLMENT = "enrolment"
    """The node is admitted, but that is not yet on its disk."""
    STATE_FETCH = "state-fetch"
    FORWARD = "forward"
    SENDING = "sending"
    BACKWARD = "backward"
    LOCAL_STEP = "local-step"
    """A gradient group's local step is done. Only at the node."""
    SYNC = "sync"
    """Gradient groups are being summed, and those of the first layer unit are done. Only at the node."""
    VALIDATION = "validation"
    """A held-out microbatch's forward is about to begin. Only at the node."""
    VOTING = "voting"
    """The step's work is done, and the vote is not sent yet."""
    COMMIT_APPLY = "commit-apply"
    """The commit is recorded (coordinator) or received (node), and not acted on yet."""
    APPLY = "apply"
    """The optimizer has stepped, and nothing is sent yet."""
    SNAPSHOT = "snapshot"
    DRAIN = "drain"
    """The node has asked to leave, and its state is being saved."""


class At(StrEnum):
    """The process or the moment of a point."""

    NODE = "node"
    TENSOR = "tensor"
    """At a node that has computed a tensor."""
    COORDINATOR = "coordinator"
    WRITE = "write"
    """At the coordinator, which is about to write a snapshot file."""
    RENAME = "rename"
    """At the coordinator, when a snapshot file is on disk under its temporary name."""


hook: Callable[[At, Phase, int, int, object], None] | None = None
"""Called with the place, the phase, the stage, the step, and the tensor that was computed, if any."""
frame_filter: "FrameFilter | None" = None
"""A `wire.link_state.FrameFilter`."""


def reach(
    phase: Phase, *, at: At = At.NODE, stage: int = ANY, step: int = ANY, tensor: object = None
) -> None:
    """Mark that this process has reached a point of its work. Raises what the hook raises."""
    if hook is not None:
        hook(at, phase, stage, step, tensor)
