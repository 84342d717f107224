"""Rebuild a run whose coordinator's disk is lost, from what nodes hold on theirs.

Every node has a small record beside its layers (`node.stage.snapshot_cache`): the run's id, its config
without paths, the text's fingerprint and the manifests of the complete snapshots. One such record is enough
to go on: nodes that join the recovered run report their layers, which are checked by SHA-256.
The certificate authority, tokens, members and history are lost; a new authority takes their place.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.config.schema import RunConfig
from node.coordinator.kept_snapshots import RECORD_FORMAT, write_kept_manifest
from node.coordinator.store import PlacedNode, SnapshotRecord, Store
from node.run_file.loader import from_json, to_json, to_toml
from node.stage.snapshot_cache import RECORD_FILE, SnapshotCache
from node.training.manifest import Manifest, SnapshotDamagedError
from node.training.snapshot import SnapshotWriter
from wire.errors import ConfigError, ProtocolViolationError, RunError, UserError
from wire.identity.authority import CertificateAuthority
from wire.identity.files import write_private

_EPOCHS = 1000
"""Epoch numbers only grow, and the newest record may be some epochs old."""


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """What one node's disk says of its run."""

    run_id: str
    epoch: int
    corpus_sha256: str
    manifests: tuple[Manifest, ...]
    """Of complete snapshots, oldest first; at least one."""

    @property
    def config(self) -> RunConfig:
        """Of the newest snapshot; paths are names only. Raises UserError."""
        # A manifest has the names of the schema's fields, a config those of the run file.
        sections = self.manifests[-1].config.items()
        values = {name: {key.rstrip("_"): value for key, value in keys.items()} for name, keys in sections}
        try:
            return from_json(json.dumps(values))
        except ConfigError as error:
            raise UserError(
                f"the run's config is of another version of thinwire ({error}): use that one"
            ) from None


def newest_record(folders: Sequence[Path]) -> NodeRecord:
    """The newest record in nodes' state directories. Raises UserError."""
    found: list[NodeRecord] = []
    for folder in folders:
        path = snapshots_of(folder) / RECORD_FILE
        try:
            found.append(_read(path))
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): give a node's state directory, of a run whose "
                "snapshots are on its nodes"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, SnapshotDamagedError) as error:
            raise UserError(f"{path} is damaged ({error}): give another node's state directory") from None
    runs = sorted({record.run_id for record in found})
    if len(runs) != 1:
        raise UserError(f"these are folders of different runs ({', '.join(runs)}): give those of one")
    return max(found, key=lambda record: (record.manifests[-1].step, record.epoch))


def snapshots_of(folder: Path) -> Path:
    """Where a node's state directory has its layers; also if that folder itself is given."""
    return folder if (folder / RECORD_FILE).is_file() else folder / "snapshots"


def recover(
    record: NodeRecord, config: RunConfig, directory: Path, folders: Sequence[Path], now: float
) -> str:
    """Make the run's directory anew; returns a line about what is there. Raises RunError or UserError."""
    authority = CertificateAuthority.create(record.run_id, now)
    newest = record.manifests[-1]
    try:
        authority.save(directory / "authority")
        write_private(directory / "run.toml", to_toml(config).encode())
        write_private(directory / "corpus.json", json.dumps({"sha256": record.corpus_sha256}).encode())
    except OSError as error:
        raise RunError(f"{directory} cannot be written ({error.strerror}): make room there") from error
    for manifest in record.manifests:
        write_kept_manifest(directory, manifest)
    here = _copy(newest, config, directory, folders)
    # The database comes last: a directory with a database is complete.
    with Store.create(
        directory, run_id=record.run_id, config_json=to_json(config), pin=authority.pin, now=now
    ) as store:
        for manifest in record.manifests:
            store.record_snapshot(SnapshotRecord.of(manifest, now))
        store.record_placement(record.epoch + _EPOCHS, [PlacedNode(0, "", "")])
    where = (
        f"all of it is in {directory}"
        if here
        else "the run goes on once machines that hold its layers have joined"
    )
    return f"recovered run {record.run_id} at the snapshot of step {newest.step}; {where}"


def _copy(manifest: Manifest, config: RunConfig, directory: Path, folders: Sequence[Path]) -> bool:
    """Copy the snapshot's layers if these folders have all of them, and say whether they do."""
    caches = [SnapshotCache(snapshots_of(folder), 0) for folder in folders]
    names = [{(name.step, name.unit, name.sha256) for name in cache.names()} for cache in caches]
    holders = {
        entry.unit: [
            cache
            for cache, known in zip(caches, names, strict=True)
            if (manifest.step, entry.unit, entry.sha256) in known
        ]
        for entry in manifest.units
    }
    if not all(holders.values()):
        return False
    writer = SnapshotWriter(directory / "snapshots", config, manifest.run_id, windows=2**62)
    for entry in manifest.units:
        copies = (cache.get(manifest.step, entry.unit) for cache in holders[entry.unit])
        kept = next((copy for copy in copies if copy is not None), None)
        if kept is None or kept.sha256 != entry.sha256:
            return False
        try:
            writer.put(manifest.step, entry.unit, kept.data, kept.sha256)
        except ProtocolViolationError as error:
            raise RunError(f"layer {entry.unit} of step {manifest.step} cannot be used: {error}") from None
    return True


def _read(path: Path) -> NodeRecord:
    fields = json.loads(path.read_bytes())
    if fields["format"] != RECORD_FORMAT:
        raise ValueError(f"format {fields['format']}, expected {RECORD_FORMAT}")
    manifests = [Manifest.from_json(text, str(path)) for text in fields["manifests"]]
    if not manifests or not math.isfinite(fields["epoch"]):
        raise ValueError("it names no snapshot")
    return NodeRecord(
        run_id=str(fields["run_id"]),
        epoch=int(fields["epoch"]),
        corpus_sha256=str(fields["corpus_sha256"]),
        manifests=tuple(sorted(manifests, key=lambda manifest: manifest.step)),
    )
