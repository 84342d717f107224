"""What is kept of a run when its private place goes: enough for `thinwire trace` and `thinwire compare`.

Its history, its trace and its database, small files all: no snapshots, no authority, no operator's key.
"""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from node.coordinator.store import DATABASE_FILE
from node.telemetry.history import HISTORY_FILE
from node.telemetry.trace_files import TRACE_DIRECTORY, segments

SECRETS = ("token_bindings", "tokens")
"""Tables of the database whose rows stay behind."""


def keep_run(run: Path, place: Path) -> bool:
    """Copy what is kept of the run directory `run`, whose coordinator has ended, to `place`.

    What is at `place` goes. False, and nothing is done, when there is no run.
    """
    if not (run / DATABASE_FILE).exists():
        return False
    if place.exists():
        shutil.rmtree(place)
    (place / TRACE_DIRECTORY).mkdir(parents=True)
    # The copy is whole, whatever the coordinator had not yet moved from its log to the file.
    with closing(sqlite3.connect(run / DATABASE_FILE)) as database:
        database.execute("VACUUM INTO ?", (str(place / DATABASE_FILE),))
    with closing(sqlite3.connect(place / DATABASE_FILE)) as copy:
        for table in SECRETS:
            copy.execute(f"DELETE FROM {table}")
        copy.commit()
        copy.execute("VACUUM")
    if (run / HISTORY_FILE).exists():
        shutil.copyfile(run / HISTORY_FILE, place / HISTORY_FILE)
    for segment in segments(run / TRACE_DIRECTORY):
        shutil.copyfile(segment, place / TRACE_DIRECTORY / segment.name)
    return True
