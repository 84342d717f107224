"""Who a node is and what its process was asked for."""

from dataclasses import dataclass
from pathlib import Path

import torch

from node.parallel.processes import DeviceGroup
from wire.identity.credentials import NodeIdentity
from wire.identity.enrolment import Hardware
from wire.pacing import Pacer


class IdentityHolder:
    """The newest identity; whoever dials or accepts reads it anew, so a renewal needs no restart."""

    def __init__(self, identity: NodeIdentity, directory: Path) -> None:
        self.current = identity
        self._directory = directory

    def replace(self, identity: NodeIdentity) -> None:
        """Use `identity` from here on, and keep it. Raises OSError or UserError where the disk refuses."""
        self.current = identity
        identity.save(self._directory)

    @property
    def node_id(self) -> str:
        return self.current.node_id

    @property
    def ca_pem(self) -> bytes:
        return self.current.ca_pem

    @property
    def certificate_pem(self) -> bytes:
        return self.current.certificate_pem

    @property
    def key_pem(self) -> bytes:
        return self.current.key_pem

    def server_name(self, node_id: str) -> str:
        return self.current.server_name(node_id)


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What one node process was asked for, resolved."""

    control_address: str
    listen: str
    advertise: str
    device: torch.device
    hardware: Hardware
    flops: float
    cache_directory: Path
    cache_bytes: int
    """Snapshots of layers kept on disk may take this much."""
    pacer: Pacer | None = None
    """The bandwidth that the machine's owner allows."""
    devices: DeviceGroup | None = None
    """More devices that share the stage with `device`."""
