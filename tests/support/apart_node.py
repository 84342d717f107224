"""`thinwire` behind a NAT with another port for each connection: two that dial at the same moment never meet,
as they do now and then on loopback. So a link whose ends open no port takes a relay.

python -m tests.support.apart_node join TOKEN ...
"""

import asyncio
import socket
import sys
from typing import Any

from node.cli.main import main as thinwire
from wire import relay_client


async def in_vain(family: socket.AddressFamily, own: Any, there: tuple[str, int]) -> socket.socket:
    """In place of `wire.dialing.again_and_again`, whose caller bounds the time."""
    return await asyncio.get_running_loop().create_future()


def main() -> int:
    relay_client.again_and_again = in_vain
    return thinwire()


if __name__ == "__main__":
    sys.exit(main())
