"""Opens a run's database file, and explains what is wrong with an unusable one."""

import contextlib
import os
import shlex
import sqlite3
from pathlib import Path
from urllib.parse import quote

from wire.errors import DiskFullError, RunError, UserError

_BUSY_SECONDS = 10.0
"""The seconds for which a writer waits for another process."""


class DamagedDatabaseError(RunError):
    """The run's database has other tables, columns or values than this program writes."""

    exit_code = UserError.exit_code


def connect(path: Path) -> sqlite3.Connection:
    """Open the file. Raises UserError if it is not a run's database, RunError if it cannot be read now."""
    # Reading a WAL database needs a writable lock file beside it, unless opened as immutable.
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        mode = "rw"
    else:
        mode = "ro&immutable=1" if _has_no_log(path) else "ro"
    try:
        return _connected(path, mode)
    except sqlite3.DatabaseError as error:
        # A full disk has no room for the lock file.
        if not (mode == "rw" and _code(error) == sqlite3.SQLITE_IOERR and _has_no_log(path)):
            raise explained(path, error) from error
    try:
        return _connected(path, "ro&immutable=1")
    except sqlite3.DatabaseError as error:
        raise explained(path, error) from error


def _has_no_log(path: Path) -> bool:
    """Whether the write-ahead log is missing or empty, so that the database's own file has everything."""
    log = path.with_name(path.name + "-wal")
    return not log.exists() or log.stat().st_size == 0


def _code(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary code for an error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    """Open the file in a mode of SQLite's. Raises UserError if it is not a run's database, and SQLite's error
    if its disk fails."""
    place = f"file:{quote(os.fsencode(path.absolute()))}?mode={mode}"
    # The store has its own lock and transactions, so SQLite needs neither a thread check nor its own.
    try:
        db = sqlite3.connect(
            place, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except sqlite3.DatabaseError as error:
        remedy = rebuilds(path) or "give a run's directory"
        raise UserError(f"{path} cannot be opened ({error}): {remedy}") from None
    try:
        db.execute("PRAGMA synchronous = FULL")
    except sqlite3.DatabaseError as error:
        db.close()
        if _code(error) in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL):
            raise
        remedy = rebuilds(path) or "give a run's directory"
        raise UserError(f"{path} is not a run's database ({error}): {remedy}") from None
    return db


def rebuilds(path: Path) -> str | None:
    """How to repair a damaged database, if there are snapshots from which it can be rebuilt."""
    if any(path.parent.glob("snapshots/step-*/manifest.json")):
        return f"`thinwire resume {shlex.quote(str(path.parent))}` rebuilds it from the run's snapshots"
    return None


def is_empty(path: Path) -> bool:
    """Whether the file has no tables, because its creator died before a run began."""
    with (
        contextlib.suppress(UserError, RunError, sqlite3.DatabaseError),
        contextlib.closing(connect(path)) as db,
    ):
        tables: int = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        return tables == 0
    return False  # a later use of the file reports what is wrong


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the error is about what the file contains. SQLITE_ERROR is about a missing table or column."""
    codes = sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DataError) or _code(error) in codes or "decode to UTF-8" in str(error)


def explained(path: Path, error: sqlite3.DatabaseError) -> RunError:
    """The error to raise if a database fails in use."""
    if _code(error) == sqlite3.SQLITE_FULL:
        return DiskFullError(f"disk full: the run's database {path} cannot grow; free some space")
    if _code(error) == sqlite3.SQLITE_READONLY:
        return RunError(
            f"the run's database {path} cannot be changed: its disk is read-only or full, or it belongs to "
            "another user; everything that was acknowledged is intact"
        )
    if is_damage(error):
        remedy = rebuilds(path) or "put back a copy of it"
        return DamagedDatabaseError(f"the run's database {path} is damaged ({error}): {remedy}")
    return RunError(
        f"the run's database {path} cannot be used ({error}): free the disk or end the process that holds "
        "it; everything that was acknowledged is intact"
    )
