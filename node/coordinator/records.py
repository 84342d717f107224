"""What the coordinator's database holds, as plain values. Times are Unix seconds."""

from dataclasses import dataclass
from enum import Enum

from wire.identity.enrolment import Hardware


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What the run is; fixed when it was created, but for the advertised addresses."""

    run_id: str
    config_json: str
    """The resolved run config."""
    pin: bytes
    """SHA-256 of the CA's SubjectPublicKeyInfo."""
    version: str
    protocol: int
    created: float
    addresses: tuple[str, ...]
    """host:port pairs that go into join tokens; empty until the coordinator listens."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node that was admitted. `evicted` is when it was shut out, None for one that is welcome."""

    node_id: str
    public_key_hash: bytes
    hardware: Hardware
    joined: float
    evicted: float | None = None


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """Who hosts a stage in an epoch, and where its neighbours reach it."""

    stage: int
    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed step. A value that is not a number is kept as such."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    clip: float
    """The coefficient that gradients were multiplied by."""
    tokens: int
    seconds: float
    committed_at: float


class StepOutcome(Enum):
    """What `record_step` found."""

    NEW = "new"
    REPEATED = "repeated"
    """The step was there already, with the same bits of loss."""
    DIFFERS = "differs"
    """The step was there already, with another loss: the run is not reproducible. The newest loss counts."""


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot after a step; `complete` once every layer's file is stored."""

    step: int
    manifest_sha256: str
    bytes: int
    complete: bool
    created: float
