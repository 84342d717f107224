"""Archive a lab's runs: copy their records without secrets, pack logs into one file."""

import shutil
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

from node.coordinator.store import DATABASE_FILE
from node.telemetry.history import history_files
from node.telemetry.trace_files import TRACE_DIRECTORY, segments

FOLDERS = ("raw", "logs", "runs")
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


def pack_logs(out: Path) -> Path | None:
    """Move the `FOLDERS` of an output directory into a file `logs.tar.xz`; return None if there are none.

    A later call writes `logs-2.tar.xz`. The folders are deleted once the archive is complete.
    """
    folders = [out / name for name in FOLDERS if (out / name).is_dir()]
    if not folders:
        return None
    names = (f"logs{f'-{number}' if number > 1 else ''}.tar.xz" for number in range(1, 10_000))
    path = next(out / name for name in names if not (out / name).exists())
    partial = path.with_name(path.name + ".partial")
    with tarfile.open(partial, "w:xz") as archive:
        for folder in folders:
            archive.add(folder, arcname=folder.name)
    partial.replace(path)
    for folder in folders:
        shutil.rmtree(folder)
    return path
