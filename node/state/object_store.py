"""Stores snapshots in an object store, through fsspec: S3, GCS, or a folder that all machines share.

    URL/RUN_ID/run.json                       what `thinwire recover` needs
    URL/RUN_ID/step-00000100/UNIT.safetensors

Nodes write and read layers directly, with the credentials in their own environment. So large data does not
pass through the coordinator, and no credential leaves its machine. A layer counts once its SHA-256 is on
record at the coordinator, so a partly written or modified layer is never used.
"""

import contextlib
import importlib
import importlib.util
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from node.state.manifest import MANIFEST_NAME, RECORD_FILE, LayerFile, Manifest, unit_file
from wire.errors import RunError, UserError, shortened

_STEP = re.compile(r"step-(\d{8,})")
_EXTRAS = {"s3": "s3fs"}
"""The additional packages that fsspec needs, by scheme. `thinwire[store]` installs them."""
_FOLDERS = ("file", "local")
"""Schemes of a folder on this machine."""
_PORTS = {"http": 80, "https": 443, "webdav": 443, "ftp": 21, "sftp": 22, "ssh": 22, "smb": 445}
"""The default ports of schemes whose addresses begin with a host, which ignores case."""
MOST_URL = 1000
"""The most characters of an address."""
_NOT_PLAIN = frozenset("%\\*[]#~")
"""Characters that a store's library may interpret as an escape, a pattern or a home directory."""


def wrong_url(url: str) -> str | None:
    """Why this cannot be an object store's address, or None. Opens no connection.

    Only plain addresses can be compared with what a machine's owner allows, because a store's library
    resolves dots, decodes escapes, expands patterns and chains addresses with "::".
    """
    scheme, _, rest = url.partition("://")
    if not rest.strip("/") or "?" in url or "@" in rest:
        return "expected SCHEME://BUCKET/FOLDER, without credentials"
    if len(url) > MOST_URL:
        return f"expected at most {MOST_URL:,} characters"
    dots = any(part and not part.strip(" .") for part in rest.split("/"))
    if dots or "::" in url or not url.isprintable() or not _NOT_PLAIN.isdisjoint(url):
        return "expected a plain path: no . or .. as a folder, no backslash, ::, %, *, [, ], # or ~"
    if scheme in _FOLDERS and not rest.startswith("/"):
        return f"expected an absolute path, as in {scheme}:///FOLDER"
    if importlib.util.find_spec("fsspec") is None:
        return "fsspec is not installed: install thinwire[store]"
    if scheme in _EXTRAS and importlib.util.find_spec(_EXTRAS[scheme]) is None:
        return f"{_EXTRAS[scheme]} is not installed: install thinwire[store]"
    known = importlib.import_module("fsspec").available_protocols()
    return (
        None if scheme in known else f"fsspec does not know {scheme!r}; it knows {', '.join(sorted(known))}"
    )


def is_below(url: str, allowed: str) -> bool:
    """Whether `url` is the address `allowed` or one below it in the same store. False if either is invalid.

    Folders on this machine are compared after resolving symbolic links.
    """
    if wrong_url(url) is not None or wrong_url(allowed) is not None:
        return False
    parts, within = _parts(url), _parts(allowed)
    return parts[: len(within)] == within


def _parts(url: str) -> list[str]:
    scheme, _, rest = url.partition("://")
    if scheme in _FOLDERS:
        rest = os.path.realpath(rest)
    first, *folders = rest.rstrip("/").split("/")
    if scheme in _PORTS:
        first = first.lower().removesuffix(f":{_PORTS[scheme]}")
    return [scheme, first, *folders]


def run_folder(url: str, run_id: str) -> str:
    """The address of a run's folder in the store that `snapshots.keep` names."""
    return f"{url.rstrip('/')}/{run_id}"


class ObjectStore:
    """One run's part of a store. Implements `node.state.manifest.SnapshotStore`."""

    def __init__(self, url: str) -> None:
        """`url` is the run's folder, as `run_folder` returns it. Raises UserError if it is invalid."""
        if (why := wrong_url(url)) is not None:
            raise UserError(f"{shortened(url)} cannot hold snapshots: {why}")
        self.url = url.rstrip("/")
        self._is_folder = url.partition("://")[0] in _FOLDERS
        fsspec: Any = importlib.import_module("fsspec")
        with self._errors(self.url):
            self._files, self._root = fsspec.core.url_to_fs(self.url)

    def put(self, step: int, unit: str, data: bytes) -> None:
        self._put(f"{self._step(step)}/{unit_file(unit)}", data)

    def get(self, step: int, unit: str, size: int) -> LayerFile:
        """See `SnapshotStore.get`. Raises RunError for a missing file too, because the store's library may
        not distinguish it from other failures."""
        path = f"{self._step(step)}/{unit_file(unit)}"
        with self._errors(path):
            self._refuse_link(path)
            with self._files.open(path, "rb") as file:
                return LayerFile.of(bytes(file.read(size)))

    def steps(self) -> tuple[int, ...]:
        with self._errors(self._root):
            self._files.invalidate_cache()  # other machines write here too
            paths = self._files.ls(self._root, detail=False) if self._files.exists(self._root) else ()
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return tuple(sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name))))

    def hold(self, steps: Collection[int], record: str = "") -> None:
        for step in self.steps():
            if step < max(steps, default=0) and step not in steps:
                self.remove(step)
        if record:
            self._put(f"{self._root}/{RECORD_FILE}", record.encode())

    def record(self) -> bytes:
        """The record that `hold` stored last. Raises RunError."""
        path = f"{self._root}/{RECORD_FILE}"
        with self._errors(path):
            self._refuse_link(path)
            return bytes(self._files.cat_file(path))

    def remove(self, step: int) -> None:
        path = self._step(step)
        with self._errors(path):
            self._refuse_link(path)
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    # ---- inside

    def _step(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _put(self, path: str, data: bytes) -> None:
        with self._errors(path):
            if self._is_folder:
                # An object store shows only complete objects. A folder needs a rename for that.
                for name in (path, f"{path}.part"):
                    self._refuse_link(name)
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(f"{path}.part", data)
                self._files.mv(f"{path}.part", path)
            else:
                self._files.pipe_file(path, data)

    def _refuse_link(self, path: str) -> None:
        """Raise OSError if a symbolic link below the run's folder leads out of it."""
        if self._is_folder and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self._root)):
            raise PermissionError(f"a symbolic link leads out of {self._root}: remove it")

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each store's library has its own errors
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RunError(
                f"{what.rpartition('/')[2]} in the object store {self.url}: {reason}; check that the store "
                "can be reached and that this machine's environment has the credentials for it"
            ) from error


# ---- on the machine that has the run directory


def stored_steps(run_directory: Path) -> dict[int, str]:
    """The folders of the run's snapshots in an object store, by step, from the coordinator's list."""
    folders = {}
    for path in sorted((run_directory / "kept").glob("step-*.url")):
        if path.with_suffix(".json").is_file():
            folders[int(path.stem.partition("-")[2])] = path.read_text().strip()
    return folders


def bring(run_directory: Path, step: int) -> Path:
    """Fetch a snapshot from the store into the run directory's `fetched` folder, unless it is there. Returns
    its folder. Raises RunError.
    """
    name = f"step-{step:08d}"
    kept = run_directory / "kept" / f"{name}.json"
    directory = run_directory / "fetched" / name
    try:
        manifest = Manifest.from_json(kept.read_bytes(), str(kept))
        fetched = directory / MANIFEST_NAME
        # A step that ran again has a different snapshot.
        if fetched.is_file() and Manifest.from_json(fetched.read_bytes(), str(fetched)) == manifest:
            return directory
        fetched.unlink(missing_ok=True)
        store = ObjectStore(stored_steps(run_directory)[step])
        directory.mkdir(parents=True, exist_ok=True)
        for entry in manifest.units:
            file = store.get(step, entry.unit, entry.bytes + 1)
            if file.sha256 != entry.sha256:
                raise RunError(f"layer {entry.unit} of step {step} is damaged in {store.url}")
            (directory / entry.file).write_bytes(file.data)
        # Written last, because a folder with a manifest counts as complete.
        (directory / MANIFEST_NAME).write_text(manifest.to_json())
    except OSError as error:
        raise RunError(f"{directory} cannot be written ({error.strerror}): make room there") from error
    return directory
