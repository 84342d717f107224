"""A snapshot's `manifest.json`, and the hash of a model's weights. Torch-free.

The weights' hash depends only on the parameters, and not on the split, the optimizer or the file's
padding. It is the SHA-256 over the units' own hashes in model order. A unit's hash is over name, dtype,
shape and bytes of each of its parameters, sorted by name.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import numpy as np

from node.config.schema import RunConfig
from node.training.loss_scale import LossScale
from wire.errors import RunError

FORMAT = 1
"""Raised whenever files or manifest change meaning."""
MANIFEST_NAME = "manifest.json"
DAMAGED_NAME = "manifest.json.damaged"
"""The name of a damaged snapshot's manifest."""


class SnapshotDamagedError(RunError):
    """A complete snapshot was changed or damaged. `what` is the message without its advice."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; use an older snapshot")
        self.what = what


@dataclass(frozen=True, slots=True)
class UnitEntry:
    """What a manifest says about one layer unit's file."""

    unit: str
    file: str
    bytes: int
    sha256: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete snapshot is: its step, its run, and the hashes of its files."""

    format: int
    run_id: str
    step: int
    """Optimizer steps taken."""
    config: dict[str, Any]
    """The resolved run file, as JSON values."""
    units: tuple[UnitEntry, ...]
    """The units in model order."""
    weights_sha256: str
    loss_scale: LossScale | None = None
    """The loss scale of the next step, in a run that computes in float16."""

    @classmethod
    def of(
        cls, run_id: str, step: int, config: RunConfig, units: Sequence[UnitEntry], scale: LossScale | None
    ) -> "Manifest":
        """The manifest of a snapshot with these files, in model order."""
        return cls(
            format=FORMAT,
            run_id=run_id,
            step=step,
            # Through JSON, so that a manifest equals itself read back: tuples become lists.
            config=json.loads(json.dumps(asdict(config))),
            units=tuple(units),
            weights_sha256=weights_sha256(entry.weights_sha256 for entry in units),
            loss_scale=scale,
        )

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.units)

    def entry(self, unit: str) -> UnitEntry:
        for entry in self.units:
            if entry.unit == unit:
                return entry
        raise RunError(f"the snapshot of step {self.step} has no unit {unit!r}; it is of another model")

    def to_json(self) -> str:
        fields = asdict(self)
        if self.loss_scale is None:
            del fields["loss_scale"]
        return json.dumps(fields, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "Manifest":
        """Read a manifest back.

        Args:
            where: names the snapshot in messages.

        Raises:
            SnapshotDamagedError: torn, with missing or wrong fields, or with a wrong weights hash.
            RunError: of another format.
        """
        try:
            fields = json.loads(text)
            # First of all: of another format, other fields are no damage.
            if fields["format"] != FORMAT:
                raise RunError(
                    f"{where} has format {fields['format']}, expected {FORMAT}; use the version that wrote it"
                )
            units = tuple(UnitEntry(**entry) for entry in fields.pop("units"))
            scale = fields.pop("loss_scale", None)
            manifest = cls(**fields, units=units, loss_scale=None if scale is None else LossScale(**scale))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SnapshotDamagedError(f"the manifest of {where} is damaged ({error})") from error
        if any(entry.file != unit_file(entry.unit) for entry in units):
            raise SnapshotDamagedError(f"the manifest of {where} names files that are no units")
        if manifest.weights_sha256 != weights_sha256(entry.weights_sha256 for entry in units):
            raise SnapshotDamagedError(f"the manifest of {where} contradicts itself on weights")
        return manifest


class LayerFile(NamedTuple):
    """What a unit's snapshot file is."""

    data: bytes
    sha256: str
    """The SHA-256 in hex."""

    @classmethod
    def of(cls, data: bytes) -> "LayerFile":
        return cls(data, sha256(data).hexdigest())

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""


class LayerSource(Protocol):
    """A unit's snapshot file that is read in pieces, in memory or on a disk."""

    @property
    def size(self) -> int:
        """The size in bytes."""

    @property
    def sha256(self) -> str: ...

    def read(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset` on. Blocks. Raises RunError if the disk fails."""

    def close(self) -> None:
        """It is read no more."""


class JoinedFile:
    """Parts of files that are read as one file. Implements `LayerSource`; its parts are others' to close."""

    def __init__(self, parts: Sequence[tuple[LayerSource, int, int]], sha256: str) -> None:
        """`parts`: a file each, and where its part begins and ends."""
        self._parts = parts
        self.size = sum(end - start for _, start, end in parts)
        self.sha256 = sha256

    def read(self, offset: int, size: int) -> bytes:
        pieces = []
        for file, start, end in self._parts:
            length = end - start
            if size > 0 and offset < length:
                pieces.append(file.read(start + offset, min(size, length - offset)))
                size -= len(pieces[-1])
            offset = max(0, offset - length)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """There is nothing to close."""


class SnapshotStore(Protocol):
    """A place that keeps the layers of a run's snapshots: the coordinator's folder, a node's disk, or an
    object store. The caller must know what a file should be, and compares the SHA-256.

    Every call blocks, and raises RunError if the place fails. Call them from a thread.
    """

    def put(self, step: int, unit: str, data: bytes) -> object:
        """Store a layer unit's file durably; it is there as a whole or not at all."""

    def get(self, step: int, unit: str, size: int) -> LayerFile | None:
        """At most `size` bytes of a unit's file; None if it is missing or known to be damaged."""

    def steps(self) -> Sequence[int]:
        """Steps whose files are here, oldest first; in the coordinator's folder, of complete snapshots."""

    def remove(self, step: int) -> None:
        """Remove a snapshot, if it is there."""

    def hold(self, steps: Collection[int], record: str = "") -> None:
        """Keep these snapshots and remove older ones; `record` is what `thinwire recover` needs."""


def unit_file(unit: str) -> str:
    return f"{unit}.safetensors"


def unit_weights_sha256(parameters: Mapping[str, np.ndarray]) -> str:
    """Hash of one unit's parameters.

    Args:
        parameters: arrays by name, without prefix.
    """
    digest = sha256()
    for name in sorted(parameters):
        array = np.ascontiguousarray(parameters[name])
        digest.update(weights_line(name, array.dtype, array.shape))
        digest.update(array.data)
    return digest.hexdigest()


def weights_line(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The bytes that come before a parameter's bytes in that hash."""
    return f"{name} {dtype.str} {shape}\n".encode()


def weights_sha256(unit_hashes: Iterable[str]) -> str:
    """Hash of a whole model from its units' hashes in model order."""
    return sha256("\n".join(unit_hashes).encode()).hexdigest()
