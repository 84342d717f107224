"""What a node says as its session with the coordinator begins."""

from wire.identity.enrolment import Hardware
from wire.messages import Hello
from wire.version import PROTOCOL, VERSION


def hello(address: str) -> Hello:
    """Of a small node that neighbours dial at `address`."""
    return Hello(
        version=VERSION,
        protocol=PROTOCOL,
        peer_address=address,
        hardware=Hardware("cpu", 2, 0),
        flops=1.0,
        download_rate=1.0,
        epoch=0,
        process_nonce=7,
    )
