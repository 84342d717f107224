"""A port that nodes join at, without a coordinator around it."""

from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.enrolment_service import JoinPort
from wire.errors import UserError
from wire.front import listen_or_advise


async def open_join_port(
    handler: EnrolmentHandler, listen: str, credentials: tuple[bytes, bytes], control_port: int
) -> tuple[JoinPort, int]:
    """Start serving joins at `listen` (host:port, port 0 for any free one); returns the server and its port.

    Args:
        credentials: as for `JoinPort.start`.
        control_port: as in `EnrolmentService`.

    The caller stops the server. Raises UserError when the port is taken.
    """
    join = JoinPort(handler)
    join.service.control_port = control_port
    await join.start(credentials)
    try:
        port = listen_or_advise(
            join.front, listen, "choose an address of this machine and a port that is free"
        )
    except UserError:
        await join.stop(None)
        raise
    return join, port
