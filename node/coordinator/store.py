"""The coordinator's database: one SQLite file in the run's directory, which survives any crash.

A method returns only after its change is on disk (WAL, synchronous=FULL). One lock protects the connection:
call it from any thread, but never from an event loop. Other processes may have the file open, such as
`thinwire token create` beside a running coordinator. Writers take turns by BEGIN IMMEDIATE and wait some
seconds.

Times are Unix seconds.
"""

import json
import math
import re
import sqlite3
import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from enum import Enum
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from node.coordinator.database import connect, explained, rebuilds
from node.state.manifest import Manifest, UnitEntry
from wire.errors import RefusalCode, UserError, shortened
from wire.identity.enrolment import Hardware, Refusal
from wire.identity.files import create_private, make_private_directory
from wire.identity.names import node_id_of
from wire.identity.token import Decision, JoinToken, TokenRecord, admit, hash_secret, new_secret, new_token_id
from wire.version import PROTOCOL, VERSION

EVICTED_WORDS = (
    "evicted from this run by its operator; to come back, ask for a new join line and give a new --state-dir"
)
_CLOSED = 2
"""The value of the column `revoked` for a token that was closed."""
DATABASE_FILE = "run.db"
SCHEMA_VERSION = 2
"""Schema 1 lacks the tables that had no use yet."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    run_id TEXT NOT NULL, config_json TEXT NOT NULL, pin BLOB NOT NULL, version TEXT NOT NULL,
    protocol INTEGER NOT NULL, created REAL NOT NULL, addresses TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (
    token_id TEXT PRIMARY KEY, secret_hash BLOB NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
    uses_allowed INTEGER NOT NULL, revoked INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS token_bindings (
    token_id TEXT NOT NULL, public_key_hash BLOB NOT NULL, PRIMARY KEY (token_id, public_key_hash));
CREATE TABLE IF NOT EXISTS members (
    node_id TEXT PRIMARY KEY, public_key_hash BLOB NOT NULL UNIQUE, device TEXT NOT NULL,
    cores INTEGER NOT NULL, memory_bytes INTEGER NOT NULL, joined REAL NOT NULL, evicted REAL);
-- Members that have not come since they were admitted.
CREATE TABLE IF NOT EXISTS unclaimed (public_key_hash BLOB PRIMARY KEY, since REAL NOT NULL);
-- Placements of the first row, and of the others.
CREATE TABLE IF NOT EXISTS placements (
    epoch INTEGER NOT NULL, stage INTEGER NOT NULL, node_id TEXT NOT NULL, address TEXT NOT NULL,
    PRIMARY KEY (epoch, stage));
CREATE TABLE IF NOT EXISTS placed_rows (
    epoch INTEGER NOT NULL, replica INTEGER NOT NULL, stage INTEGER NOT NULL, node_id TEXT NOT NULL,
    address TEXT NOT NULL, PRIMARY KEY (epoch, replica, stage));
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, loss REAL, grad_norm REAL, lr REAL, clip REAL,
    tokens INTEGER NOT NULL, seconds REAL NOT NULL, committed_at REAL NOT NULL);
-- Squared gradient norms of the newest steps' layer units.
CREATE TABLE IF NOT EXISTS unit_norms (
    step INTEGER NOT NULL, unit INTEGER NOT NULL, squared_norm REAL NOT NULL,
    PRIMARY KEY (step, unit)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held_out (
    step INTEGER PRIMARY KEY, loss REAL, uncompressed REAL, samples INTEGER NOT NULL,
    measured_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (
    step INTEGER PRIMARY KEY, manifest_sha256 TEXT NOT NULL, bytes INTEGER NOT NULL,
    complete INTEGER NOT NULL, created REAL NOT NULL);
-- What the layers of complete snapshots are, as their holders agreed. Step 0 is the checkpoint.
CREATE TABLE IF NOT EXISTS snapshot_layers (
    step INTEGER NOT NULL, unit TEXT NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (step, unit)) WITHOUT ROWID;
-- See node/coordinator/decisions.py.
CREATE TABLE IF NOT EXISTS decisions (
    kind TEXT NOT NULL, at INTEGER NOT NULL, decision TEXT NOT NULL, PRIMARY KEY (kind, at));
"""

_TYPES = {"TEXT": str, "INTEGER": int, "REAL": float, "BLOB": bytes}
_TABLES = {
    table: re.findall(r"(\w+) (TEXT|INTEGER|REAL|BLOB)( NOT NULL| PRIMARY KEY)?", columns)
    for table, columns in re.findall(r"EXISTS (\w+) \((.*?)\)(?: WITHOUT ROWID)?;", _SCHEMA, re.DOTALL)
}
_COLUMNS = {table: ", ".join(name for name, _, _ in columns) for table, columns in _TABLES.items()}
"""The columns of each table for SELECT, in the order of `_SCHEMA`."""
EVERY_RECORD = tuple(f"SELECT {columns} FROM {table}" for table, columns in _COLUMNS.items())
"""Queries that read the whole database."""


def _allowed_types() -> dict[str, set[type]]:
    """The types of the values in the columns of each name."""
    allowed: dict[str, set[type]] = {}
    for columns in _TABLES.values():
        for name, kind, required in columns:
            allowed.setdefault(name, set()).update([_TYPES[kind], _TYPES[kind] if required else type(None)])
    return allowed


_ALLOWED = _allowed_types()

NORMS_KEPT = 4096
"""The steps whose norms are kept. A run that returns further compares norms of the whole model first."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The run's identity. Only the advertised addresses can change."""

    run_id: str
    config_json: str
    pin: bytes
    """SHA-256 of the CA's SubjectPublicKeyInfo."""
    version: str
    protocol: int
    created: float
    addresses: tuple[str, ...]
    """host:port pairs for join tokens; empty until the coordinator listens."""

    def values(self) -> dict[str, dict[str, Any]]:
        """The run config by section and key, also of another version."""
        sections: dict[str, dict[str, Any]] = json.loads(self.config_json)
        return sections


@dataclass(frozen=True, slots=True)
class Member:
    """An admitted node. `evicted`: when the operator evicted it, or None."""

    node_id: str
    public_key_hash: bytes
    hardware: Hardware
    joined: float
    evicted: float | None = None


@dataclass(frozen=True, slots=True)
class Eviction:
    node_id: str
    at: float
    tokens: tuple[TokenRecord, ...]
    """The tokens that admitted the node, as they were before the eviction."""
    evicted: frozenset[bytes]
    """The keys of all evicted nodes."""
    keeps_token: bool

    def __str__(self) -> str:
        text = f"evicted {self.node_id}: it gets no stage and no certificate from now on"
        for token in self.tokens:
            left = token.uses_allowed - token.uses if token.state(self.at) == "usable" else 0
            uses = f"{left} more node{'s' * (left != 1)}"
            text += f"; it came by token {token.token_id}, "
            if not left:
                text += "which admits no more nodes"
            elif self.keeps_token:
                text += f"which still admits {uses}, this one under another key too"
            else:
                text += f"which would have admitted {uses} and is closed"
            if others := sorted(map(node_id_of, token.bound - self.evicted)):
                text += f", as did {', '.join(others)}"
        return text if self.tokens else f"{text}; by which token it came is not on record"


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node that hosts a stage in an epoch, and the address at which neighbours reach it."""

    stage: int
    node_id: str
    address: str
    replica: int = 0
    """The row of the grid."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A committed step. NaN values are kept."""

    step: int
    epoch: int
    loss: float
    """NaN if no token counts as a label."""
    grad_norm: float
    lr: float
    clip: float
    """The coefficient by which gradients were multiplied for clipping."""
    tokens: int
    seconds: float
    committed_at: float


class StepOutcome(Enum):
    NEW = "new"
    REPEATED = "repeated"
    """The step was recorded before, with the same bits of loss."""
    DIFFERS = "differs"
    """The step was recorded with another loss, so the run is not reproducible. The newest loss counts."""


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot after a step. It is `complete` when every layer's file is stored."""

    step: int
    manifest_sha256: str
    bytes: int
    complete: bool
    created: float

    @classmethod
    def of(cls, manifest: Manifest, created: float) -> "SnapshotRecord":
        """The record of a complete snapshot."""
        digest = sha256(manifest.to_json().encode()).hexdigest()
        return cls(manifest.step, digest, manifest.total_bytes, True, created)


class Store:
    """An open run database. Close it, or use it as a context manager."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path = path
        self._db = db
        db.row_factory = checked_row
        self._lock = threading.Lock()

    @classmethod
    def create(cls, directory: Path, *, run_id: str, config_json: str, pin: bytes, now: float) -> "Store":
        """Create a run's database in `directory` (mode 0700). UserError if the directory has a run."""
        make_private_directory(directory)
        path = directory / DATABASE_FILE
        create_private(path, b"")
        store = cls(path, connect(path))
        try:
            # Outside a transaction, once: the setting persists in the file.
            with store.reading() as db:
                db.execute("PRAGMA journal_mode = WAL")
            with store.writing() as db:
                if db.execute("PRAGMA user_version").fetchone()[0]:
                    raise UserError(f"{directory} already has a run: resume it, or choose another directory")
                _create_tables(db)
                db.execute(
                    "INSERT INTO run VALUES (1, ?, ?, ?, ?, ?, ?, '[]')",
                    (run_id, config_json, pin, VERSION, PROTOCOL, now),
                )
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, directory: Path) -> "Store":
        """Open an existing run's database. UserError if there is none or another version wrote it."""
        path = directory / DATABASE_FILE
        if not path.is_file():
            raise UserError(f"{directory} has no run (no {DATABASE_FILE}): give a run's directory")
        store = cls(path, connect(path))
        try:
            with store.reading() as db:
                version: int = db.execute("PRAGMA user_version").fetchone()[0]
        except BaseException:
            store.close()
            raise
        if version == SCHEMA_VERSION:
            return store
        store.close()
        if version == 0:
            remedy = rebuilds(path) or f"delete {directory} and start the run again"
            raise UserError(f"{path} was never finished: {remedy}")
        raise UserError(
            f"{path} has schema {version} and this thinwire reads schema {SCHEMA_VERSION}: "
            "use the version of thinwire that created it"
        )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- the run

    def run(self) -> RunRecord:
        with self.reading() as db:
            return read_run(db)

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Set the join port's host:port pairs for tokens that any process creates from now on."""
        with self.writing() as db:
            db.execute("UPDATE run SET addresses = ?", (json.dumps(list(addresses)),))

    def set_config(self, config_json: str) -> None:
        """Replace the resolved run config: a resumed run may have other stages or addresses."""
        with self.writing() as db:
            db.execute("UPDATE run SET config_json = ?", (config_json,))

    # ---- tokens

    def create_token(self, now: float, ttl: timedelta, uses: int) -> tuple[TokenRecord, JoinToken]:
        """Create a token for `uses` nodes, valid for `ttl`. The store keeps only the hash of its secret."""
        if uses < 1 or ttl <= timedelta(0):
            raise UserError(f"a token with {uses} uses for {ttl} admits no node: both must be above zero")
        secret = new_secret()
        expires = now + ttl.total_seconds()
        with self.writing() as db:
            run = read_run(db)
            if not run.addresses:
                raise UserError("the coordinator has no address yet: start it once before creating tokens")
            record = TokenRecord(new_token_id(), hash_secret(secret), now, expires, uses)
            token = JoinToken(run.addresses, run.run_id, run.pin, record.token_id, secret)
            db.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, 0)",
                (record.token_id, record.secret_hash, now, expires, uses),
            )
        return record, token

    def list_tokens(self) -> list[TokenRecord]:
        """All tokens of the run, oldest first."""
        with self.reading() as db:
            return _tokens(db, "1")

    def revoke_token(self, token_id: str) -> bool:
        """Let a token admit no more nodes. Admitted nodes stay. False for an unknown id."""
        if not token_id.isascii():
            return False
        with self.writing() as db:
            cursor = db.execute("UPDATE tokens SET revoked = 1 WHERE token_id = ?", (token_id,))
            return cursor.rowcount == 1

    def admit_token(
        self, token_id: str, secret: bytes, member: Member, useless: Refusal | None = None
    ) -> Decision:
        """Apply the token rules at `member.joined`. Admission records use and member in one transaction.

        A refusal changes nothing. The same key may ask again and is admitted without another use.

        Args:
            useless: why the run cannot use this node. It is only reported to holders of a valid token.
        """
        with self.writing() as db:
            records = _tokens(db, "token_id = ?", token_id)
            record = records[0] if records else None
            decision = admit(record, secret, member.public_key_hash, member.joined)
            if decision.refusal is None and (refusal := _refuse_member(db, member)) is not None:
                decision = Decision(refusal)
            if decision.refusal is None and useless is not None:
                decision = Decision(useless)
            if decision.refusal is None:
                if decision.in_place_of is not None:
                    _withdraw(db, token_id, decision.in_place_of)
                _put_member(db, member)
            if decision.refusal is None and decision.new_use:
                key = member.public_key_hash
                db.execute("INSERT INTO token_bindings VALUES (?, ?)", (token_id, key))
                db.execute("INSERT OR REPLACE INTO unclaimed VALUES (?, ?)", (key, member.joined))
            return decision

    def withdraw(self, token_id: str, public_key_hash: bytes) -> bool:
        """Give back the use of an admitted node that cannot join. False if it has joined or is unknown."""
        with self.writing() as db:
            return _withdraw(db, token_id, public_key_hash)

    def claim(self, node_ids: Collection[str]) -> None:
        """These nodes have joined, so their uses of tokens are spent."""
        with self.writing() as db:
            db.executemany(
                "DELETE FROM unclaimed WHERE public_key_hash = "
                "(SELECT public_key_hash FROM members WHERE node_id = ?)",
                [(node_id,) for node_id in node_ids],
            )

    # ---- members and their places

    def members(self) -> list[Member]:
        """All nodes that were ever admitted, including evicted ones, in the order of joining."""
        with self.reading() as db:
            return _members(db, "1")

    def member(self, node_id: str) -> Member | None:
        with self.reading() as db:
            rows = _members(db, "node_id = ?", node_id)
            return rows[0] if rows else None

    def restore_members(self, members: Sequence[Member]) -> None:
        """Restore members of a damaged database, including evictions."""
        with self.writing() as db:
            for member in members:
                _put_member(db, member)
                values = member.evicted, member.node_id
                db.execute("UPDATE members SET evicted = ? WHERE node_id = ?", values)

    def evict(self, node_id: str, now: float, *, keep_token: bool = False) -> "Eviction | None":
        """Evict a node: its key is never admitted again. None if it is not a member.

        Its token admits no other key either, or the node would return at once. Other admitted nodes stay.

        Args:
            keep_token: whether the token's remaining uses stay valid.
        """
        if not node_id.isascii():  # no id is, and SQLite cannot store unpaired surrogates
            return None
        with self.writing() as db:
            rows = _members(db, "node_id = ?", node_id)
            if not rows:
                return None
            db.execute("UPDATE members SET evicted = coalesce(evicted, ?) WHERE node_id = ?", (now, node_id))
            key = rows[0].public_key_hash
            by = "token_id IN (SELECT token_id FROM token_bindings WHERE public_key_hash = ?)"
            tokens = _tokens(db, by, key)
            if not keep_token:
                db.execute(
                    f"UPDATE tokens SET revoked = ? WHERE revoked = 0 AND {by}",
                    (_CLOSED, key),
                )
            out = {member.public_key_hash for member in _members(db, "evicted IS NOT NULL")}
            return Eviction(node_id, now, tuple(tokens), frozenset(out), keeps_token=keep_token)

    def evicted(self) -> list[str]:
        with self.reading() as db:
            return [row[0] for row in db.execute("SELECT node_id FROM members WHERE evicted IS NOT NULL")]

    def record_placement(self, epoch: int, nodes: Sequence[PlacedNode]) -> None:
        """Record the hosts of an epoch. Recording the same epoch again replaces them."""
        with self.writing() as db:
            db.execute("DELETE FROM placements WHERE epoch = ?", (epoch,))
            first = [(epoch, node.stage, node.node_id, node.address) for node in nodes if not node.replica]
            db.executemany("INSERT INTO placements VALUES (?, ?, ?, ?)", first)
            others = [(epoch, n.replica, n.stage, n.node_id, n.address) for n in nodes if n.replica]
            db.execute("DELETE FROM placed_rows WHERE epoch = ?", (epoch,))
            db.executemany("INSERT INTO placed_rows VALUES (?, ?, ?, ?, ?)", others)

    def placement(self, epoch: int) -> list[PlacedNode]:
        """The nodes of an epoch by stage, row after row; empty if none was recorded."""
        with self.reading() as db:
            query = "SELECT stage, node_id, address FROM placements WHERE epoch = ? ORDER BY stage"
            nodes = [PlacedNode(*row) for row in db.execute(query, (epoch,))]
            query = (
                "SELECT stage, node_id, address, replica FROM placed_rows WHERE epoch = ? "
                "ORDER BY replica, stage"
            )
            return nodes + [PlacedNode(*row) for row in db.execute(query, (epoch,))]

    def last_epoch(self) -> int:
        """The highest recorded epoch; 0 before the first."""
        with self.reading() as db:
            epoch: int = db.execute("SELECT coalesce(max(epoch), 0) FROM placements").fetchone()[0]
            return epoch

    # ---- steps, snapshots

    def record_step(self, step: StepRecord, norms: Mapping[int, float] | None = None) -> StepOutcome:
        """Record a committed step. A repeated step with the same bits changes nothing.

        A step with other bits replaces the recorded one and deletes all later ones: they are based on the old
        state, and the highest recorded step must be the newest commit.

        Args:
            norms: squared gradient norms by the layer unit's number.
        """
        with self.writing() as db:
            row = db.execute(f"SELECT {_COLUMNS['steps']} FROM steps WHERE step = ?", (step.step,)).fetchone()
            known = None if row is None else _step(row)
            if known is not None and all(map(_same_bits, _what_it_did(known), _what_it_did(step))):
                return StepOutcome.REPEATED
            db.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(step))
            _put_norms(db, step.step, norms or {})
            if known is None:
                return StepOutcome.NEW
            db.execute("DELETE FROM steps WHERE step > ?", (step.step,))
            db.execute("DELETE FROM unit_norms WHERE step > ?", (step.step,))
            return StepOutcome.REPEATED if _same_bits(known.loss, step.loss) else StepOutcome.DIFFERS

    def steps(self, after: int = -1) -> list[StepRecord]:
        """The committed steps above `after`, in order."""
        with self.reading() as db:
            rows = db.execute(f"SELECT {_COLUMNS['steps']} FROM steps WHERE step > ? ORDER BY step", (after,))
            return [_step(row) for row in rows]

    def steps_with_clip(self, clip: float) -> list[int]:
        """The numbers of the committed steps with this clip coefficient, in order."""
        query = "SELECT step FROM steps WHERE clip = ? ORDER BY step"
        with self.reading() as db:
            return [row[0] for row in db.execute(query, (clip,))]

    def unit_norms(self, after: int) -> dict[int, dict[int, float]]:
        """Squared gradient norms of the committed steps above `after`, by step and layer unit."""
        norms: dict[int, dict[int, float]] = {}
        with self.reading() as db:
            query = "SELECT step, unit, squared_norm FROM unit_norms WHERE step > ? ORDER BY step, unit"
            for step, unit, norm in db.execute(query, (after,)):
                norms.setdefault(step, {})[unit] = norm
        return norms

    def last_step(self) -> StepRecord | None:
        """The highest committed step; None before the first."""
        with self.reading() as db:
            row = db.execute(f"SELECT {_COLUMNS['steps']} FROM steps ORDER BY step DESC LIMIT 1").fetchone()
            return None if row is None else _step(row)

    def record_snapshot(self, snapshot: SnapshotRecord, layers: Iterable[UnitEntry] = ()) -> None:
        """Record a snapshot with its layers, replacing an earlier record of the same step."""
        with self.writing() as db:
            db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?)", astuple(snapshot))
            db.execute("DELETE FROM snapshot_layers WHERE step = ?", (snapshot.step,))
            values = [(snapshot.step, layer.unit, layer.sha256) for layer in layers]
            db.executemany("INSERT INTO snapshot_layers VALUES (?, ?, ?)", values)

    def is_on_record(self, manifest: Manifest) -> bool:
        """Whether a snapshot's layers are the recorded ones; True if none of its step are recorded."""
        with self.reading() as db:
            query = "SELECT unit, sha256 FROM snapshot_layers WHERE step = ?"
            known = dict(db.execute(query, (manifest.step,)).fetchall())
        return not known or known == {layer.unit: layer.sha256 for layer in manifest.units}

    def record_first_layer(self, unit: str, sha256: str) -> None:
        """Record what a unit of the checkpoint is from which the run starts. An earlier record stays."""
        with self.writing() as db:
            db.execute("INSERT OR IGNORE INTO snapshot_layers VALUES (0, ?, ?)", (unit, sha256))

    def first_layers(self) -> dict[str, str]:
        """The SHA-256 of the checkpoint's units, as far as nodes asked for them."""
        with self.reading() as db:
            return dict(db.execute("SELECT unit, sha256 FROM snapshot_layers WHERE step = 0").fetchall())

    def snapshots(self) -> list[SnapshotRecord]:
        """All snapshots by step, including incomplete ones."""
        with self.reading() as db:
            rows = db.execute(f"SELECT {_COLUMNS['snapshots']} FROM snapshots ORDER BY step")
            return [SnapshotRecord(row[0], row[1], row[2], bool(row[3]), row[4]) for row in rows]

    def record_held_out(
        self, step: int, loss: float | None, uncompressed: float, samples: int, now: float
    ) -> None:
        """Insert or replace the held-out loss of a step (`node.run_state.actions.RecordHeldOut`)."""
        with self.writing() as db:
            values = step, loss, uncompressed, samples, now
            db.execute("INSERT OR REPLACE INTO held_out VALUES (?, ?, ?, ?, ?)", values)

    def held_out(self) -> dict[int, float]:
        """The recorded losses with fp32 on every link, by step."""
        with self.reading() as db:
            rows = db.execute("SELECT step, uncompressed FROM held_out ORDER BY step").fetchall()
        return {step: _float(loss) for step, loss in rows}

    def best_of(self, steps: Iterable[int]) -> int | None:
        """The step with the least held-out loss among these; None if none has one."""
        losses = {step: loss for step, loss in self.held_out().items() if math.isfinite(loss)}
        return min((step for step in steps if step in losses), key=lambda step: losses[step], default=None)

    def delete_snapshot(self, step: int) -> bool:
        """Delete a snapshot's record but not its files. False if there was none."""
        with self.writing() as db:
            db.execute("DELETE FROM snapshot_layers WHERE step = ?", (step,))
            return db.execute("DELETE FROM snapshots WHERE step = ?", (step,)).rowcount == 1

    # ---- transactions

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One durable transaction: the complete block or, if it raises, nothing."""
        with self.reading() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except sqlite3.DatabaseError as error:
                raise explained(self.path, error) from error


def _create_tables(db: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def checked_row(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row factory. Raises sqlite3.DataError for a value of another type than its column has: SQLite itself
    accepts any."""
    for column, value in zip(cursor.description, row, strict=True):
        allowed = _ALLOWED.get(column[0])  # None for the name of an expression
        if allowed is not None and type(value) not in allowed:
            raise sqlite3.DataError(f"the column {column[0]} has {shortened(repr(value))}")
    return row


def read_run(db: sqlite3.Connection) -> RunRecord:
    """The run's record. Raises sqlite3's errors."""
    columns = "run_id, config_json, pin, version, protocol, created, addresses"
    row = db.execute(f"SELECT {columns} FROM run").fetchone()
    if row is None:
        raise sqlite3.DataError("the table run is empty")
    run_id, config_json, pin, version, protocol, created, listed = row
    addresses, config = _parsed(listed), _parsed(config_json)
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise sqlite3.DataError(f"the column addresses has {shortened(listed)}")
    if not isinstance(config, dict) or not all(isinstance(section, dict) for section in config.values()):
        raise sqlite3.DataError(f"the column config_json has {shortened(config_json)}")
    return RunRecord(run_id, config_json, pin, version, protocol, created, tuple(addresses))


def _parsed(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _tokens(db: sqlite3.Connection, where: str, *values: str | bytes) -> list[TokenRecord]:
    query = f"SELECT {_COLUMNS['tokens']} FROM tokens WHERE {where} ORDER BY created, token_id"
    rows = db.execute(query, values).fetchall()
    bindings = "SELECT public_key_hash FROM token_bindings WHERE token_id = ?"
    since = dict(db.execute(f"SELECT {_COLUMNS['unclaimed']} FROM unclaimed"))
    records = []
    for token_id, secret_hash, created, expires, uses, revoked in rows:
        bound = frozenset(key for (key,) in db.execute(bindings, (token_id,)))
        unclaimed = {key: since[key] for key in bound & since.keys()}
        closed = revoked == _CLOSED
        records.append(
            TokenRecord(
                token_id,
                secret_hash,
                created,
                expires,
                uses,
                revoked=bool(revoked) and not closed,
                bound=bound,
                unclaimed=unclaimed,
                closed=closed,
            )
        )
    return records


def _withdraw(db: sqlite3.Connection, token_id: str, public_key_hash: bytes) -> bool:
    """Delete a member that has never joined, and free its use of the token. An evicted one stays evicted."""
    key = (public_key_hash,)
    bound = "SELECT 1 FROM token_bindings WHERE token_id = ? AND public_key_hash = ?"
    if db.execute(bound, (token_id, *key)).fetchone() is None:
        return False
    if db.execute("DELETE FROM unclaimed WHERE public_key_hash = ?", key).rowcount == 0:
        return False
    db.execute("DELETE FROM token_bindings WHERE public_key_hash = ?", key)
    db.execute("DELETE FROM members WHERE public_key_hash = ? AND evicted IS NULL", key)
    return True


def _members(db: sqlite3.Connection, where: str, *values: str | bytes) -> list[Member]:
    columns = _COLUMNS["members"]
    rows = db.execute(f"SELECT {columns} FROM members WHERE {where} ORDER BY joined, node_id", values)
    return [Member(row[0], row[1], Hardware(*row[2:5]), joined=row[5], evicted=row[6]) for row in rows]


def _refuse_member(db: sqlite3.Connection, member: Member) -> Refusal | None:
    for known in _members(db, "node_id = ? OR public_key_hash = ?", member.node_id, member.public_key_hash):
        if (known.node_id, known.public_key_hash) != (member.node_id, member.public_key_hash):
            return Refusal(RefusalCode.BAD_REQUEST, f"{member.node_id} has another key: join with a new one")
        if known.evicted is not None:
            return Refusal(RefusalCode.EVICTED, f"{member.node_id} was {EVICTED_WORDS}")
    return None


def _put_member(db: sqlite3.Connection, member: Member) -> None:
    """Insert or update a member. It keeps its first joining time; its hardware may have changed."""
    hardware = member.hardware
    db.execute(
        "INSERT INTO members VALUES (?, ?, ?, ?, ?, ?, NULL) ON CONFLICT (node_id) DO UPDATE SET "
        "device = excluded.device, cores = excluded.cores, memory_bytes = excluded.memory_bytes",
        (
            member.node_id,
            member.public_key_hash,
            hardware.device,
            hardware.cores,
            hardware.memory_bytes,
            member.joined,
        ),
    )


def _put_norms(db: sqlite3.Connection, step: int, norms: Mapping[int, float]) -> None:
    db.execute("DELETE FROM unit_norms WHERE step = ? OR step < ?", (step, step - NORMS_KEPT))
    values = [(step, unit, norm) for unit, norm in norms.items()]
    db.executemany("INSERT INTO unit_norms VALUES (?, ?, ?)", values)


def _step(row: tuple[Any, ...]) -> StepRecord:
    step, epoch, loss, grad_norm, lr, clip, tokens, seconds, committed_at = row
    values = (_float(loss), _float(grad_norm), _float(lr), _float(clip))
    return StepRecord(step, epoch, *values, tokens, seconds, committed_at)


def _what_it_did(step: StepRecord) -> tuple[float, ...]:
    """The values that identify what the step did."""
    return step.loss, step.grad_norm, step.lr, step.clip


def _float(value: float | None) -> float:
    """The value, where NULL is NaN, because SQLite cannot store NaN."""
    return math.nan if value is None else value


def _same_bits(left: float, right: float) -> bool:
    both_nan = math.isnan(left) and math.isnan(right)
    return both_nan or struct.pack("<d", left) == struct.pack("<d", right)
