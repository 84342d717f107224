"""Finds or creates a run's directory."""

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from wire.errors import UserError
from wire.identity.files import check_free_or_ours, check_regular_files

DEFAULT_PARENT = Path("runs")
OURS = ("authority",)
"""Files that identify a run's directory before its database was created."""
DEMO_LOGS = "logs"
"""The folder that a demo creates before its coordinator starts."""


def new_run_directory(wanted: Path | None, name: str) -> Path:
    """Create the directory of a new run: `wanted`, or else the first free `runs/<name>-<n>`.

    Raises UserError if `wanted` is in use or cannot be created.
    """
    try:
        if wanted is not None:
            if run_began(wanted):
                raise UserError(
                    f"{wanted} already contains a run: continue it with `thinwire resume "
                    f"{shlex.quote(str(wanted))}`, or give another --run-dir"
                )
            check_free_or_ours(wanted, OURS, "--run-dir", besides=(DEMO_LOGS,))
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
            return wanted
        DEFAULT_PARENT.mkdir(exist_ok=True)
        number = 1
        while True:
            directory = DEFAULT_PARENT / f"{name}-{number}"
            try:
                directory.mkdir(mode=0o700)
            except FileExistsError:
                number += 1
            else:
                return directory
    except OSError as error:
        place = wanted or DEFAULT_PARENT
        raise UserError(
            f"cannot create a run directory at {place} ({error.strerror}); give another --run-dir"
        ) from error


def existing_run_directory(path: Path) -> Path:
    """Return `path` if it contains a run that this user may read. Raises UserError otherwise."""
    from node.coordinator.store import DATABASE_FILE

    try:
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; give the run directory that the coordinator printed")
        if not holds_run(path):
            raise UserError(f"{path} contains no run (it has no database); give a run directory")
        allowed = os.access(path / DATABASE_FILE, os.R_OK)
    except PermissionError:
        allowed = False
    if not allowed:
        raise UserError(f"{path} cannot be read: only root and the user that runs its coordinator may")
    return path


def holds_run(directory: Path) -> bool:
    """Whether the directory has a run's database. Raises UserError for a path that is not UTF-8, and for a
    run with a pipe or the like in the place of a file."""
    from node.coordinator.store import DATABASE_FILE
    from node.run_file.loader import is_text

    if not is_text(str(directory)):  # the run's messages carry its directory
        raise UserError(f"{str(directory)!r} is not valid UTF-8: rename that directory, or give another one")
    holds = (directory / DATABASE_FILE).exists()
    if holds:
        check_regular_files(directory)
    return holds


def run_began(directory: Path) -> bool:
    """Whether there is a run to resume. There is none if its coordinator died while creating the database."""
    from node.coordinator.database import is_empty
    from node.coordinator.rebuild import damage
    from node.coordinator.store import DATABASE_FILE

    return holds_run(directory) and (not is_empty(directory / DATABASE_FILE) or damage(directory) is not None)


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Make files and folders that are created in this context private to the owner.

    The run directory itself may be readable by others if the user has allowed it.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
