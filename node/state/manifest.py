"""A snapshot's `manifest.json`, and the hash of a model's weights. Torch-free.

The weights' hash depends only on the parameters, not on the split, the optimizer or the file's padding. It is
the SHA-256 over the units' hashes in model order. A unit's hash covers name, dtype, shape and bytes of each
parameter, sorted by name.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import numpy as np

from node.config.schema import RunConfig
from node.training.loss_scale import LossScale
from wire.errors import RunError

RECORD_FILE = "run.json"
"""Where a store keeps what `thinwire recover` needs."""
FORMAT = 1
"""The format's number, which increases whenever files or manifest change meaning."""
MOST_STEPS, MOST_BYTES = 2**32 - 1, 2**62
"""The largest step that a frame on a link can carry, and the most bytes of a layer."""
READ_BYTES = 1 << 20
MANIFEST_NAME = "manifest.json"
DAMAGED_NAME = "manifest.json.damaged"
"""The name of a damaged snapshot's manifest."""


class SnapshotDamagedError(RunError):
    """A complete snapshot was changed or damaged. `what` is the message without the advice."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; use an older snapshot")
        self.what = what


@dataclass(frozen=True, slots=True)
class UnitEntry:
    """A manifest's entry for the file of a layer unit."""

    unit: str
    file: str
    bytes: int
    sha256: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a complete snapshot: its step, its run, and the hashes of its files."""

    format: int
    run_id: str
    step: int
    """The number of optimizer steps taken."""
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
            # Through JSON, which turns tuples into lists, so that a manifest equals its copy read back.
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
        raise RunError(f"the snapshot of step {self.step} has no unit {unit!r}; it belongs to another model")

    def to_json(self) -> str:
        fields = asdict(self)
        if self.loss_scale is None:
            del fields["loss_scale"]
        return json.dumps(fields, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "Manifest":
        """Read a manifest back.

        Args:
            where: the name of the snapshot in messages.

        Raises:
            SnapshotDamagedError: it is cut short, has missing or wrong fields, or a wrong weights hash.
            RunError: it has another format.
        """
        try:
            fields = json.loads(text)
            # Checked first, because other fields in another format are not damage.
            if fields["format"] != FORMAT:
                raise RunError(
                    f"{where} has format {fields['format']}, expected {FORMAT}; use the version that wrote it"
                )
            units = tuple(UnitEntry(**entry) for entry in fields.pop("units"))
            scale = fields.pop("loss_scale", None)
            manifest = cls(**fields, units=units, loss_scale=None if scale is None else LossScale(**scale))
            manifest._check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SnapshotDamagedError(f"the manifest of {where} is damaged ({error})") from error
        if any(entry.file != unit_file(entry.unit) for entry in units):
            raise SnapshotDamagedError(f"the manifest of {where} names files that are not units")
        if manifest.weights_sha256 != weights_sha256(entry.weights_sha256 for entry in units):
            raise SnapshotDamagedError(f"the manifest of {where} has inconsistent hashes of weights")
        return manifest

    def _check(self) -> None:
        """Raise ValueError for a value that no manifest has. A member may have written it."""
        sections = self.config.values()
        if not all(isinstance(section, dict) for section in sections):
            raise ValueError("its config has no sections")
        whole = [(self.step, MOST_STEPS), *((entry.bytes, MOST_BYTES) for entry in self.units)]
        for number, most in whole:
            if type(number) is not int or not 0 <= number <= most:
                raise ValueError(f"{str(number)[:40]} is no step or size")
        for entry in self.units:
            if not is_unit_name(entry.unit):
                raise ValueError(f"{entry.unit[:40]!r} is no layer")
            for digest in (entry.sha256, entry.weights_sha256):
                if not re.fullmatch("[0-9a-f]{64}", digest):
                    raise ValueError(f"{digest[:40]!r} is no SHA-256")


class LayerFile(NamedTuple):
    """A unit's snapshot file in memory. Implements `LayerSource`."""

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


class LayerBytes(Protocol):
    """A file that is read in pieces."""

    @property
    def size(self) -> int:
        """The size in bytes."""

    def read(self, offset: int, size: int) -> bytes:
        """Read at most `size` bytes from `offset` on. Blocks. Raises RunError if the disk fails."""


class LayerSource(LayerBytes, Protocol):
    """A unit's snapshot file, in memory or on disk, whose SHA-256 is known."""

    @property
    def sha256(self) -> str: ...

    def close(self) -> None:
        """Release the file."""


class StoredLayer:
    """A file on this machine's disk. It can be read until it is closed, even if it is removed meanwhile.
    Implements `LayerSource`."""

    def __init__(self, handle: int, size: int, sha256: str, *, start: int = 0) -> None:
        """
        Args:
            handle: the descriptor of an open file, which this object closes.
            start: where the layer's bytes begin in it.
        """
        self._handle = handle
        self._start = start
        self.size = size
        self.sha256 = sha256

    def read(self, offset: int, size: int) -> bytes:
        try:
            return pread(self._handle, self._start + offset, min(size, self.size - offset))
        except OSError as error:
            raise RunError(f"the disk cannot be read ({error.strerror})") from error

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    __del__ = close


def pread(handle: int, offset: int, size: int) -> bytes:
    """`size` bytes of an open file, or fewer at its end. Raises OSError."""
    pieces = []
    # One call of Linux reads less than 2 GiB.
    while size > 0 and (piece := os.pread(handle, size, offset)):
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class JoinedFile:
    """Reads parts of files as one file. Implements `LayerSource`. The caller closes the parts."""

    def __init__(self, parts: Sequence[tuple[LayerSource, int, int]], sha256: str) -> None:
        """`parts`: files, each with the start and end of its part."""
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
        """Do nothing, because the caller closes the parts."""


def hash_of(file: LayerBytes) -> str:
    """The SHA-256 of a file's bytes, in hex. Raises what reading it raises."""
    digest, at = sha256(), 0
    while piece := file.read(at, READ_BYTES):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()


class SnapshotStore(Protocol):
    """Stores the layers of a run's snapshots: in the coordinator's folder, on a node's disk, or in an object
    store. The caller compares the SHA-256 of a file with the expected one.

    All methods block, and raise RunError if the store fails. Call them from a thread.
    """

    def put(self, step: int, unit: str, data: bytes) -> object:
        """Store a layer unit's file durably and atomically."""

    def get(self, step: int, unit: str, size: int) -> LayerFile | None:
        """At most `size` bytes of a unit's file; None if it is missing or known to be damaged."""

    def steps(self) -> Sequence[int]:
        """The steps that have files here, oldest first; at the coordinator, only of complete snapshots."""

    def remove(self, step: int) -> None:
        """Remove a snapshot if it exists."""

    def hold(self, steps: Collection[int], record: str = "") -> None:
        """Keep these snapshots and remove older ones. `record` is the data for `thinwire recover`."""


def is_unit_name(text: str) -> bool:
    """Whether a file may have this name from a stranger: it leads to no other folder."""
    return text.replace(".", "").isalnum()


def unit_file(unit: str) -> str:
    return f"{unit}.safetensors"


def weights_line(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What precedes a parameter's bytes in the hash of a unit's weights."""
    return f"{name} {dtype.str} {shape}\n".encode()


def weights_sha256(unit_hashes: Iterable[str]) -> str:
    """The hash of a whole model from its units' hashes in model order."""
    return sha256("\n".join(unit_hashes).encode()).hexdigest()
