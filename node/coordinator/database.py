"""How a run's SQLite file is opened, also where it cannot be written: read-only media, another's run."""

import contextlib
import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from wire.errors import RunError, UserError

_BUSY_SECONDS = 10.0


def connect(path: Path) -> sqlite3.Connection:
    """Open the file. Raises UserError when it is none of ours."""
    # Even reading takes a file beside it that a reader may lock, unless nobody can be writing.
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        mode = "rw"
    else:
        mode = "ro" if path.with_name(path.name + "-wal").exists() else "ro&immutable=1"
    place = f"file:{quote(os.fsencode(path.absolute()))}?mode={mode}"
    # The store's lock replaces sqlite3's own thread check; transactions are its own, so no implicit ones.
    try:
        db = sqlite3.connect(
            place, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} cannot be opened ({error}): give a run's directory") from None
    try:
        db.execute("PRAGMA synchronous = FULL")
    except sqlite3.DatabaseError as error:
        db.close()
        raise UserError(f"{path} is not a run's database ({error}): give a run's directory") from None
    return db


def is_empty(path: Path) -> bool:
    """Whether nothing is in the file: its maker died at once, and no run began."""
    with contextlib.suppress(UserError, sqlite3.DatabaseError), contextlib.closing(connect(path)) as db:
        tables: int = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        return tables == 0
    return False  # what it is instead is told by whoever uses it


def explained(path: Path, error: sqlite3.DatabaseError) -> RunError:
    """What to tell of a database that fails in use."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY:
        return RunError(
            f"the run's database {path} cannot be changed from here: it is on a read-only disk, or another "
            "user's; all that was acknowledged is intact"
        )
    return RunError(
        f"the run's database {path} cannot be used ({error}): free the disk or end the process that holds "
        "it; all that was acknowledged is intact"
    )
