"""Copies the records of a lab's runs, without secrets."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from node.coordinator.store import DATABASE_FILE
from node.telemetry.history import history_files
from node.telemetry.trace_files import TRACE_DIRECTORY, segments

SECRETS = ("token_bindings", "tokens")
"""Database tables whose rows are not copied."""


def keep_run(run: Path, place: Path) -> bool:
    """Copy history, trace and database of the run directory `run` to `place`, without secrets.

    The copy is enough for `thinwire trace` and `thinwire compare`. It has no snapshots, no CA and no
    operator's key. The coordinator must have ended. Replaces `place`. Returns False if there is no run.
    """
    if not (run / DATABASE_FILE).exists():
        return False
    if place.exists():
        shutil.rmtree(place)
    (place / TRACE_DIRECTORY).mkdir(parents=True)
    # A plain copy would lack what is still in the write-ahead log.
    with closing(sqlite3.connect(run / DATABASE_FILE)) as database:
        database.execute("VACUUM INTO ?", (str(place / DATABASE_FILE),))
    with closing(sqlite3.connect(place / DATABASE_FILE)) as copy:
        for table in SECRETS:
            copy.execute(f"DELETE FROM {table}")
        copy.commit()
        copy.execute("VACUUM")
    for file in history_files(run):
        shutil.copyfile(file, place / file.name)
    for segment in segments(run / TRACE_DIRECTORY):
        shutil.copyfile(segment, place / TRACE_DIRECTORY / segment.name)
    return True
