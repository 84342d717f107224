"""Rebuilds what a coordinator's disk has lost: the database from snapshots, or the run from nodes' disks.

`rebuild`: the database is damaged, empty, missing or out of date. A snapshot's manifest names the run and has
    its config; the run's CA is in its directory; the history has placements, steps and evictions. Members are
    taken from the old database as far as it can be read. Tokens are not, because a revoked token must not
    return. The old files are kept as `run.db.damaged`. A coordinator whose database has no commit starts from
    the newest snapshot.

`recover`: the whole directory is lost. Every node has a small record beside its layers
    (`node.state.snapshot_cache`): the run's id, its config without paths, the text's fingerprint and the
    manifests of the complete snapshots. One record is enough: nodes that join the recovered run report their
    layers, which are checked by SHA-256. The certificate authority, tokens, members and history are lost, and
    a new authority is created.
"""

import contextlib
import json
import math
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from node.config.schema import RunConfig
from node.coordinator.database import connect, is_damage
from node.coordinator.decisions import record_plan
from node.coordinator.kept_snapshots import RECORD_FORMAT, write_kept_manifest
from node.coordinator.store import (
    DATABASE_FILE,
    EVERY_RECORD,
    SCHEMA_VERSION,
    Member,
    PlacedNode,
    SnapshotRecord,
    StepRecord,
    Store,
    checked_row,
    read_run,
)
from node.run_file.loader import read_toml, stored_config, to_json, to_toml
from node.run_state.actions import RecordPlan
from node.state.manifest import (
    MANIFEST_NAME,
    RECORD_FILE,
    Manifest,
    SnapshotDamagedError,
    SnapshotStore,
    UnitEntry,
)
from node.state.object_store import ObjectStore, wrong_url
from node.state.snapshot import SnapshotFolder, list_snapshots, read_manifest, snapshot_directory
from node.state.snapshot_cache import SnapshotCache
from node.telemetry import events
from node.telemetry.history import evicted_nodes, plans_made, step_done
from node.tuning.codec_plan import CodecPlan
from node.tuning.storage_choice import StoragePlan
from node.view.checkpoint import read_view
from wire.errors import ConfigError, ProtocolViolationError, RunError, UserError
from wire.identity.authority import CertificateAuthority
from wire.identity.enrolment import Hardware
from wire.identity.files import check_regular_files, write_private
from wire.identity.names import is_run_id

ASIDE = ".damaged"
RUN_FILE = "run.toml"
_NOT_A_RECORD = (ValueError, KeyError, TypeError, AttributeError, RecursionError, SnapshotDamagedError)
"""The errors from reading a damaged record; RecursionError comes from thousands of brackets."""
_COMPANIONS = ("", "-wal", "-shm")
"""The suffixes of the files that SQLite keeps for a database."""


def damage(directory: Path) -> str | None:
    """What is wrong with the database of the run in `directory`; None if nothing is, or if there are no
    snapshots.

    Call it only while no coordinator has the run. A database of another version is not damaged.

    Raises UserError for a pipe or the like in the place of a file.
    """
    check_regular_files(directory)
    path = directory / DATABASE_FILE
    steps = list_snapshots(directory / "snapshots")
    if not steps or not (directory / "authority").is_dir():
        return None
    if not path.is_file():
        return f"{path} is missing"
    try:
        with contextlib.closing(connect(path)) as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                return f"{path} is empty"
            if version != SCHEMA_VERSION:
                return None
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                return f"{path} is damaged ({' '.join(str(verdict).split())[:120]})"
            newest = db.execute("SELECT coalesce(max(step), -1) FROM steps").fetchone()[0]
            recorded = db.execute("SELECT coalesce(max(step), 0) FROM snapshots").fetchone()[0]
            db.row_factory = checked_row
            config_json = read_run(db).config_json
            for query in EVERY_RECORD:
                for _ in db.execute(query):
                    pass
    except UserError as error:
        return str(error).partition(":")[0]
    except sqlite3.OperationalError as error:
        if is_damage(error):
            return f"{path} is incomplete ({error})"
        return None  # locked, or its disk is full; a later use reports it
    except sqlite3.DatabaseError as error:
        return f"{path} is damaged ({error})"
    # A commit is recorded before its snapshot. Without the commit, the end of the database is lost.
    if max(newest + 1, recorded) < steps[-1]:
        return f"{path} ends at step {max(newest + 1, recorded)}, before the snapshot of step {steps[-1]}"
    try:
        stored_config(config_json)
    except ConfigError as error:
        # If run.toml, which has the same config, cannot be read either, another version stored the run.
        with contextlib.suppress(ConfigError):
            _config_of_run_file(directory)
            return f"{path} is damaged ({str(error).partition(';')[0]})"
    return None


def rebuild(directory: Path, what: str, now: float) -> str:
    """Replace the database. `what` is wrong with it. Returns a line about what was and was not recovered.

    Raises UserError if neither a manifest nor run.toml can be read, RunError if a file cannot be written.
    """
    authority = CertificateAuthority.load(directory / "authority")
    manifests = _manifests(directory / "snapshots")
    if manifests and manifests[-1].run_id != authority.run_id:
        raise UserError(
            f"{what}, and the snapshots are of run {manifests[-1].run_id}, not of {authority.run_id}: put "
            "back this run's snapshots"
        )
    config_json = _config(directory, manifests, what)
    members, whole = _members(directory / DATABASE_FILE)
    with contextlib.suppress(RunError):
        evicted = evicted_nodes(directory)
        members = [_evicted(member, evicted) for member in members]
    try:
        with tempfile.TemporaryDirectory(prefix=".rebuild-", dir=directory) as folder:
            folder_made = Path(folder)
            store = Store.create(
                folder_made, run_id=authority.run_id, config_json=config_json, pin=authority.pin, now=now
            )
            with store:
                store.restore_members(members)
                _record(store, directory, manifests, now)
            for ending in _COMPANIONS:
                old = directory / (DATABASE_FILE + ending)
                if old.exists():
                    old.replace(directory / (DATABASE_FILE + ASIDE + ending))
            for ending in _COMPANIONS:
                new = folder_made / (DATABASE_FILE + ending)
                if new.exists():
                    new.replace(directory / new.name)
    except OSError as error:
        raise RunError(
            f"{directory} cannot be written ({error.strerror}): free some space or change its permissions"
        ) from error
    return _news(directory, what, manifests, members, whole=whole)


def _config(directory: Path, manifests: list[Manifest], what: str) -> str:
    """The run's config: the newest snapshot's, otherwise the run file's."""
    if manifests:
        with contextlib.suppress(ConfigError):  # from a version with fewer keys
            return to_json(_config_of(manifests[-1]))
    if not (directory / RUN_FILE).is_file():
        raise UserError(f"{what}; no manifest has a usable config, and run.toml is missing: put back a copy")
    return to_json(_config_of_run_file(directory))


def _config_of_run_file(directory: Path) -> RunConfig:
    """The config in a run's run.toml, which has every key. Raises ConfigError."""
    return stored_config(json.dumps(read_toml(directory / RUN_FILE, "run file", "another run's run.toml")))


def _news(
    directory: Path, what: str, manifests: list[Manifest], members: list[Member], *, whole: bool
) -> str:
    newest = f"the snapshot of step {manifests[-1].step}" if manifests else "run.toml"
    shut_out = sum(member.evicted is not None for member in members)
    known = f"{len(members)} members ({shut_out} evicted)" if members else "no members"
    lost = "all tokens" if whole else "all tokens, and members and evictions that the history does not show"
    return (
        f"{what}: rebuilt from {newest}, the old file is {DATABASE_FILE}{ASIDE}. Recovered: {known}. "
        f"Lost: {lost}. Nodes that are refused join with the new line; repeat evictions with `thinwire evict`"
    )


def _manifests(root: Path) -> list[Manifest]:
    """The readable manifests, oldest first."""
    manifests = []
    for step in list_snapshots(root):
        with contextlib.suppress(SnapshotDamagedError):
            manifests.append(read_manifest(snapshot_directory(root, step)))
    return manifests


def _members(path: Path) -> tuple[list[Member], bool]:
    """The members in the old database as far as they can be read, and whether none is missing."""
    members: list[Member] = []
    try:
        with contextlib.closing(connect(path)) as db:
            db.row_factory = checked_row
            for node_id, key, device, cores, memory, joined, evicted in db.execute("SELECT * FROM members"):
                members.append(Member(node_id, key, Hardware(device, cores, memory), joined, evicted))
    except (UserError, sqlite3.DatabaseError, ValueError, TypeError):
        return members, False
    return members, True


def _evicted(member: Member, evicted: dict[str, float]) -> Member:
    at = evicted.get(member.node_id)
    return member if at is None or member.evicted is not None else replace(member, evicted=at)


def _record(store: Store, directory: Path, manifests: list[Manifest], now: float) -> None:
    """Record snapshots, the newest epoch, plans of codecs and storages, and the step before the newest
    snapshot."""
    for manifest in manifests:
        path = snapshot_directory(directory / "snapshots", manifest.step) / MANIFEST_NAME
        digest = sha256(path.read_bytes()).hexdigest()
        made_at = path.stat().st_mtime
        record = SnapshotRecord(manifest.step, digest, manifest.total_bytes, True, made_at)
        store.record_snapshot(record, manifest.units)
    try:
        view = read_view(directory)[0].view()
        done = step_done(directory, manifests[-1].step) if manifests else None
        planned = plans_made(directory, events.CodecsPlanned)
        stored = plans_made(directory, events.StoragesPlanned)
    except RunError:
        return  # the history is damaged too, but it is only a convenience
    if view.epoch:
        # Epoch numbers only grow. Addresses are not in the history; nodes report theirs again.
        stages = [PlacedNode(stage.stage, stage.node_id, "") for stage in view.stages]
        store.record_placement(view.epoch, stages or [PlacedNode(0, "", "")])
    # A plan that was made after a rollback replaces those of later steps, as it did then.
    for codecs in planned:
        plan = CodecPlan(activations=codecs.activations, gradients=codecs.gradients)
        record_plan(store, RecordPlan(step=codecs.step, plan=plan))
    for storages in stored:
        record_plan(store, RecordPlan(step=storages.step, plan=StoragePlan(storages.storages)))
    if done is not None:
        store.record_step(_step(done, view.epoch, view.tokens_per_step, now))


def _step(done: events.StepDone, epoch: int, tokens: int, now: float) -> StepRecord:
    """A step's record without its clip coefficient, because no node may commit this step again."""
    return StepRecord(
        step=done.step - 1,
        epoch=epoch,
        loss=done.loss,
        grad_norm=done.grad_norm,
        lr=done.lr,
        clip=math.nan,
        tokens=tokens,
        seconds=done.seconds,
        committed_at=now,
    )


_EPOCHS, _MOST_EPOCHS = 1000, 2**31
"""Added to the newest recorded epoch, which may be outdated, because epoch numbers only grow; and the most
that a record may have: frames on links carry at most `2**32 - 1`."""


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """What one node's disk records about its run."""

    run_id: str
    epoch: int
    corpus_sha256: str
    manifests: tuple[Manifest, ...]
    """The manifests of complete snapshots, oldest first; at least one."""
    urls: Mapping[int, str]
    """The object store's folder of each snapshot that is not on nodes, by step."""
    named_by: int = 1
    """How many of the records that were given name the newest of these snapshots."""

    @property
    def config(self) -> RunConfig:
        """The newest snapshot's run file, in which paths are only names. Raises UserError."""
        try:
            return _config_of(self.manifests[-1])
        except ConfigError as error:
            raise UserError(
                f"the run's config is from another version of thinwire ({error}): use that version"
            ) from None


def newest_record(places: Sequence[Path | str]) -> NodeRecord:
    """The newest record in nodes' state directories, or in a run's folder in an object store (a string).

    Raises UserError.
    """
    records: list[NodeRecord] = []
    known: dict[tuple[str, int], tuple[Manifest, Path | str]] = {}
    for place in places:
        path = place if isinstance(place, str) else snapshots_of(place) / RECORD_FILE
        if isinstance(place, Path):
            check_regular_files(place)
        try:
            records.append(_read(_store(place).record(), str(path)))
            _compare(records[-1], path, known)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): give a node's state directory, of a run whose "
                "snapshots are on its nodes"
            ) from None
        except _NOT_A_RECORD as error:
            raise UserError(f"{path} is damaged ({error}): give another node's state directory") from None
        except RunError as error:  # raised by the object store
            raise UserError(str(error)) from None
    runs = sorted({record.run_id for record in records})
    if len(runs) != 1:
        raise UserError(f"these are folders of different runs ({', '.join(runs)}): give those of one")
    newest = max(records, key=lambda record: (record.manifests[-1].step, record.epoch))
    return replace(newest, named_by=sum(newest.manifests[-1] in record.manifests for record in records))


def _compare(
    record: NodeRecord, path: Path | str, known: dict[tuple[str, int], tuple[Manifest, Path | str]]
) -> None:
    """Raise UserError if another node's record contradicts this one about a snapshot."""
    for manifest in record.manifests:
        other, where = known.setdefault((record.run_id, manifest.step), (manifest, path))
        if other != manifest:
            raise UserError(
                f"{path} and {where} disagree about the snapshot of step {manifest.step}, so one of "
                "them is wrong: leave out the one that most others contradict"
            )


def _store(place: Path | str) -> ObjectStore | SnapshotCache:
    """A node's state directory, or a run's folder in an object store (given as a string)."""
    return ObjectStore(place) if isinstance(place, str) else SnapshotCache(snapshots_of(place), 0)


def snapshots_of(folder: Path) -> Path:
    """The folder with a node's layers, given its state directory or that folder itself."""
    return folder if (folder / RECORD_FILE).is_file() else folder / "snapshots"


def recover(
    record: NodeRecord, config: RunConfig, directory: Path, places: Sequence[Path | str], now: float
) -> str:
    """Create a new directory for the run. Returns a line about its contents. Raises RunError or UserError."""
    authority = CertificateAuthority.create(record.run_id, now)
    newest = record.manifests[-1]
    try:
        authority.save(directory / "authority")
        write_private(directory / RUN_FILE, to_toml(config).encode())
        write_private(directory / "corpus.json", json.dumps({"sha256": record.corpus_sha256}).encode())
    except OSError as error:
        raise RunError(f"{directory} cannot be written ({error.strerror}): make room there") from error
    for manifest in record.manifests:
        write_kept_manifest(directory, manifest, record.urls.get(manifest.step, ""))
    nodes = [_store(place) for place in places if isinstance(place, Path)]
    is_copied = _copy(newest, config, directory, nodes)
    # The database comes last: a directory with a database is complete.
    with Store.create(
        directory, run_id=record.run_id, config_json=to_json(config), pin=authority.pin, now=now
    ) as store:
        for manifest in record.manifests:
            store.record_snapshot(SnapshotRecord.of(manifest, now), manifest.units)
        store.record_placement(record.epoch + _EPOCHS, [PlacedNode(0, "", "")])
    where = (
        f"all of it is in {directory}"
        if is_copied
        else f"its layers are in {record.urls[newest.step]}"
        if newest.step in record.urls
        else "the run continues when machines that hold its layers have joined"
    )
    few = "" if record.named_by == len(places) else f", which {record.named_by} of {len(places)} places name"
    return f"recovered run {record.run_id} at the snapshot of step {newest.step}{few}; {where}"


def _copy(manifest: Manifest, config: RunConfig, directory: Path, stores: Sequence[SnapshotStore]) -> bool:
    """Copy the snapshot's layers if these stores have all of them. Returns whether they do."""
    folder = SnapshotFolder(directory / "snapshots", config, manifest.run_id, windows=2**62)
    for entry in manifest.units:
        if (data := _find(entry, manifest.step, stores)) is None:
            folder.remove(manifest.step)
            return False
        try:
            folder.put(manifest.step, entry.unit, data)
        except ProtocolViolationError as error:
            raise RunError(f"layer {entry.unit} of step {manifest.step} cannot be used: {error}") from None
    return True


def _find(entry: UnitEntry, step: int, stores: Sequence[SnapshotStore]) -> bytes | None:
    """A layer's file from the first store that has an intact one."""
    for store in stores:
        file = store.get(step, entry.unit, entry.bytes + 1)
        if file is not None and file.sha256 == entry.sha256:
            return file.data
    return None


def _read(data: bytes, where: str) -> NodeRecord:
    fields = json.loads(data)
    if fields["format"] != RECORD_FORMAT:
        raise ValueError(f"format {fields['format']}, expected {RECORD_FORMAT}")
    manifests = [Manifest.from_json(text, where) for text in fields["manifests"]]
    run_id, epoch, corpus = fields["run_id"], fields["epoch"], fields["corpus_sha256"]
    if not manifests or type(epoch) is not int or not 0 <= epoch <= _MOST_EPOCHS:
        raise ValueError("it names no snapshot or no epoch")
    if not is_run_id(run_id) or any(manifest.run_id != run_id for manifest in manifests):
        raise ValueError("its snapshots are not of one run")
    if not isinstance(corpus, str):
        raise ValueError("its text has no fingerprint")
    urls = {int(step): str(url) for step, url in fields.get("urls", {}).items()}
    for url in urls.values():
        # The coordinator will remove old snapshots from this folder.
        if wrong_url(url) is not None or not url.endswith(f"/{run_id}"):
            raise ValueError(f"{url[:80]!r} is no folder of run {run_id[:40]!r} in an object store")
    return NodeRecord(
        run_id=run_id,
        epoch=epoch,
        corpus_sha256=corpus,
        urls=urls,
        manifests=tuple(sorted(manifests, key=lambda manifest: manifest.step)),
    )


def _config_of(manifest: Manifest) -> RunConfig:
    """The config in a manifest. Raises ConfigError for another version's."""
    # A manifest has the names of the schema's fields, a config those of the run file.
    sections = manifest.config.items()
    return stored_config(
        json.dumps({name: {key.rstrip("_"): value for key, value in keys.items()} for name, keys in sections})
    )
