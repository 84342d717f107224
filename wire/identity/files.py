"""Files that hold keys: private to the user, and on disk whole or not at all."""

import os
import secrets
from pathlib import Path


def make_private_directory(directory: Path) -> None:
    """Create `directory` (mode 0700) with its parents; one that exists is made 0700."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` (mode 0600) atomically: temporary file, fsync, rename, fsync of the directory."""
    temporary = _write_beside(path, data)
    temporary.replace(path)
    _sync_directory(path.parent)


def create_private(path: Path, data: bytes) -> bytes:
    """Write `path` (mode 0600) unless it exists, atomically among processes; returns what it holds after."""
    temporary = _write_beside(path, data)
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        return path.read_bytes()
    finally:
        temporary.unlink()
    _sync_directory(path.parent)
    return data


def _write_beside(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink()
        raise
    return temporary


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
