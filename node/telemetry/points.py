"""Points of a run, at which a test's process can have something happen: it sets `hook` or `frame_filter`.

Both are None in production, and then to pass a point does nothing.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wire.link_state import FrameFilter

ANY = -1
"""Any stage or step."""


class Phase(StrEnum):
    """When. Most phases have a point at the node and one at the coordinator."""

    ENROLMENT = "enrolment"
    """Admitted; not yet on the node's disk."""
    STATE_FETCH = "state-fetch"
    FORWARD = "forward"
    SENDING = "sending"
    BACKWARD = "backward"
    LOCAL_STEP = "local-step"
    """After a gradient group's local step; at the node alone."""
    SYNC = "sync"
    """Gradient groups are being summed, the first layer unit's are; at the node alone."""
    VALIDATION = "validation"
    """Before a held-out microbatch's forward; at the node alone."""
    VOTING = "voting"
    """The step's work is done; the vote is not sent yet."""
    COMMIT_APPLY = "commit-apply"
    """The commit is recorded (coordinator) or received (node), and not acted on yet."""
    APPLY = "apply"
    """The optimizer has stepped; nothing is sent yet."""
    SNAPSHOT = "snapshot"
    DRAIN = "drain"
    """The node has asked to leave; its state is being saved."""


class At(StrEnum):
    """Where."""

    NODE = "node"
    TENSOR = "tensor"
    """At a node that has computed a tensor."""
    COORDINATOR = "coordinator"
    WRITE = "write"
    """At the coordinator, which is about to write a snapshot file."""
    RENAME = "rename"
    """At the coordinator; a snapshot file is on disk under its temporary name."""


hook: Callable[[At, Phase, int, int, object], None] | None = None
"""Called with where and when, the stage, the step, and the tensor that was computed, if one was."""
frame_filter: "FrameFilter | None" = None
"""A `wire.link_state.FrameFilter`."""


def reach(
    phase: Phase, *, at: At = At.NODE, stage: int = ANY, step: int = ANY, tensor: object = None
) -> None:
    """This process is at this point of its work. Raises what the hook does."""
    if hook is not None:
        hook(at, phase, stage, step, tensor)
