"""Private files, written atomically, and the folders for a user's files."""

import contextlib
import errno
import os
import pwd
import secrets
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from wire.errors import UserError

_IGNORED = frozenset(("lock", "lost+found", "snapshots"))
"""Names to ignore: left by a failed start, created by a file system, or a disk mounted for snapshots."""


def home() -> Path:
    """The user's home: $HOME, or the entry in the user database. Raises UserError if there is neither."""
    given = os.environ.get("HOME", "")
    if not given:
        with contextlib.suppress(KeyError):  # containers may run as ids that are not in the database
            given = pwd.getpwuid(os.getuid()).pw_dir
    if not Path(given).is_absolute():
        raise UserError("this user has no home directory: set HOME")
    return Path(given)


def state_folder() -> Path:
    """The folder for a user's keys and crash reports: `$XDG_STATE_HOME/thinwire`, or
    `~/.local/state/thinwire`. It is not created. Raises UserError if neither is known."""
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """The folder for reproducible files: `$XDG_CACHE_HOME/thinwire`, or `~/.cache/thinwire`. It is not
    created. Raises UserError if neither is known."""
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, below_home: str) -> Path:
    given = Path(os.environ.get(variable, ""))
    if not given.is_absolute():  # the XDG specification says to ignore relative paths
        try:
            given = home() / below_home
        except UserError as error:
            raise UserError(f"{error} or {variable} to a folder that this user may write to") from None
    return given / "thinwire"


def make_private_directory(directory: Path) -> None:
    """Create `directory` (mode 0700) with its parents, unless it exists.

    Raises PermissionError when it belongs to another user, unless this process runs as root.
    """
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        # Raises again for a file or a broken link.
        directory.mkdir(exist_ok=True)
        if os.geteuid() not in (0, directory.stat().st_uid):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(directory)) from None


def check_free_or_ours(
    directory: Path, ours: Collection[str], option: str, *, besides: Collection[str] = ()
) -> None:
    """Raise UserError unless keys may go into `directory`, which the user gave as `option`. It need not
    exist.

    It must contain a file named in `ours`, or be empty, belong to the user and not let everybody replace
    files. thinwire never changes the permissions of a directory that it did not create.

    Args:
        besides: names to ignore.
    """
    try:
        names = {entry.name for entry in directory.iterdir()}.difference(_IGNORED, besides)
    except FileNotFoundError:
        return
    if not names.isdisjoint(ours):
        return
    place = directory.stat()
    advice = f"give {option} a directory of its own, such as {directory / 'thinwire'}"
    if place.st_uid != os.geteuid():
        raise UserError(f"{directory} belongs to another user, so no keys are written there: {advice}")
    if names:
        some = ", ".join(sorted(names)[:3])
        raise UserError(f"{directory} contains other files ({some}), so no keys are written there: {advice}")
    # With the sticky bit others may add files, but not replace ours.
    if place.st_mode & stat.S_IWOTH and not place.st_mode & stat.S_ISVTX:
        raise UserError(f"everybody may write to {directory}, so no keys are written there: {advice}")


def check_regular_files(directory: Path, depth: int = 3) -> None:
    """Raise UserError if there is a pipe, a device, a broken link or the like below `directory`, because
    reading it may never end.

    Args:
        depth: how many levels of folders to look at. Links are followed, and may lead back.
    """
    try:
        with os.scandir(directory) as scanned:
            entries = list(scanned)
        for entry in entries:
            path = Path(entry.path)
            if entry.is_file(follow_symlinks=False) or path.is_file():
                continue
            if path.is_dir():
                if depth > 1:
                    check_regular_files(path, depth - 1)
            elif entry.is_symlink() or path.exists():  # not one that was removed meanwhile
                raise UserError(
                    f"{path} is a pipe, a device or a broken link: remove it, or put the file back"
                )
    except OSError:
        return  # a later use reports it


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` (mode 0600) atomically: temporary file, fsync, rename, fsync of the directory."""
    temporary = _write_beside(path, data)
    temporary.replace(path)
    sync_directory(path.parent)


def create_private(path: Path, data: bytes) -> bytes:
    """Write `path` (mode 0600) unless it exists, atomically among processes. Returns its content."""
    temporary = _write_beside(path, data)
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        return path.read_bytes()
    finally:
        temporary.unlink()
    sync_directory(path.parent)
    return data


def _write_beside(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with _named(path), os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink()
        raise
    return temporary


def sync_directory(directory: Path) -> None:
    """Make the names of new and renamed files durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with _named(directory):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to an error that lacks one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
