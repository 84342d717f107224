"""Messages for joining a run, as plain values. Protobuf stays in the servicer and the client."""

from dataclasses import dataclass, field
from typing import Annotated

from wire.declared import Parsed, Text
from wire.errors import RefusalCode, Refused

CPU = "cpu"
"""The name of a device without an accelerator."""
MPS = "mps"
"""The name of a Mac's GPU."""


def at_least_one(count: int) -> int:
    """The count, where 0 (a field that was not sent) means 1."""
    return count or 1


Some = Annotated[int, Parsed(at_least_one)]


@dataclass(frozen=True, slots=True)
class Hardware:
    """A node's hardware, as the node reports it. It is shown to people and never trusted."""

    device: Text
    """`cpu` or the name of the accelerator."""
    cores: int
    memory_bytes: int
    """The memory of the device that a stage would use; the smallest if there are several devices."""
    devices: Some = 1
    """The number of devices that share the stage, each in its own process."""
    tensor_parallel: Some = 1
    """How many of the devices share each block. It divides `devices`."""
    host_bytes: int = 0
    """The main memory into which each device may move state; 0 if devices use main memory anyway."""
    arithmetic: Text = ""
    """Identifies the arithmetic: nodes with the same value compute the same bits."""

    def contradiction(self) -> str:
        whole = self.devices % self.tensor_parallel == 0
        return (
            "" if whole else f"{self.devices} devices cannot be divided into groups of {self.tensor_parallel}"
        )


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A node asks for its first certificate in a run."""

    version: str
    protocol: int
    run_id: str
    token_id: str
    secret: bytes = field(repr=False)
    csr_der: bytes = field(repr=False)
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Granted:
    """The node is now a member. This is its certificate."""

    node_id: str
    certificate_pem: bytes
    ca_pem: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request is refused. The message is one line that says what was wrong and what to do."""

    code: RefusalCode
    message: Text

    def error(self) -> Refused:
        return Refused(self.code, self.message)
