"""The user's files: which files of a folder count, what they contain, and how to open and write them.

Training text is UTF-8, optionally compressed. A byte order mark is not part of the text. A file with a zero
byte is not text, so that this byte can separate documents.
"""

import bz2
import codecs
import errno
import gzip
import io
import logging
import lzma
import os
import re
import stat
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

from wire.errors import ConfigError, DataError, UserError
from wire.identity.files import home

logger = logging.getLogger(__name__)

SEPARATOR = b"\0"
STDLIB = "stdlib"
STDLIB_LIMIT_BYTES = 32 << 20
"""The standard library's text ends after about this many bytes, at the end of a file."""

JSON_SUFFIXES = frozenset((".jsonl", ".ndjson", ".jsonlines", ".json"))
"""Files with rows: one object per line, or an array of objects. A folder's .json files are data only if they
have rows."""
TEXT_SUFFIXES = frozenset((".txt", ".md", ".rst", ".tex", ".html", ".csv", ".py", ".c", ".h"))
PARQUET = ".parquet"
ARROW = ".arrow"
TABLES = (PARQUET, ARROW)
TOKEN_SUFFIXES = frozenset((".npy", ".bin"))
COMPRESSED = frozenset((".xz", ".gz", ".zst", ".bz2"))
MOST_EXPANSION = 100
"""A compressed file may grow to this many times its size, or to `SURE_BYTES`."""
SURE_BYTES = 64 << 20
MOST_FILE_BYTES = 256 << 20
"""The most bytes of a settings file."""
_READ_BYTES = 1 << 16
_END_BYTES = 1 << 16
_ZSTD_READ_BYTES = 1 << 10
"""All that is read is decompressed at once, to up to 32 MiB."""
_ZSTD_WINDOW_BYTES = 1 << 31
"""The largest window of zstd, which `zstd --long=31` writes. Memory is used only as far as text fills it."""
_XZ_BYTES = 512 << 20
"""The memory for decompressing .xz. Its strongest preset needs 65 MiB."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_ADDRESS = re.compile("[a-z][a-z0-9]+:/")
_ARCHIVES = {
    "a gzip file": b"\x1f\x8b",
    "a zstd file": b"\x28\xb5\x2f\xfd",
    "an xz file": b"\xfd7zXZ\0",
    "a bzip2 file": b"BZh",
    "a zip archive": b"PK\x03\x04",
    "a parquet file": b"PAR1",
    "an Arrow file": b"ARROW1",
    "a NumPy array": b"\x93NUMPY",
    "a PDF": b"%PDF-",
    "a database of SQLite": b"SQLite format 3\0",
}
# Some of these are not part of every installation, others are not part of the standard library.
_STDLIB_SKIPPED = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"))


def expanded(path: str, key: str) -> Path:
    """`path` with a leading `~` or `~user` replaced by that home directory.

    Args:
        key: the run-file key that names the path, for the message.

    Raises:
        ConfigError: the home directory is unknown.
    """
    own, _, below = path.partition("/")
    try:
        return home() / below if own == "~" else Path(path).expanduser()
    except (RuntimeError, UserError):
        raise ConfigError(
            f"{key} {path!r}: this machine knows no home directory of that user; write the absolute path"
        ) from None


def files_below(
    folder: Path,
    skipped: frozenset[str] = frozenset(),
    left_out: Counter[str] | None = None,
    *,
    links: bool = False,
) -> Iterator[Path]:
    """Visible regular files at any depth, in the order of their names. Links to folders are not followed.

    Args:
        skipped: names of folders not to enter.
        left_out: counts what is skipped: hidden files and folders, links that leave the folder, pipes,
            devices and the like.
        links: include files that are links to somewhere else.

    Raises:
        DataError: a folder cannot be read.
    """
    left_out = Counter() if left_out is None else left_out
    roots = _roots(folder)
    waiting = _entries(folder)
    while waiting:
        path = waiting.pop()
        if path.name in skipped:
            continue
        if path.name.startswith("."):
            left_out["hidden"] += 1
            continue
        mode, is_link = _mode(path), path.is_symlink()
        if stat.S_ISDIR(mode):
            if is_link:
                left_out["link to a folder"] += 1
            else:
                waiting += _entries(path)
        elif not stat.S_ISREG(mode):
            left_out["no regular file"] += 1
        elif is_link and not links and not any(path.resolve().is_relative_to(root) for root in roots):
            left_out["link out of the folder"] += 1
        else:
            yield path


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder, in reverse order of their names."""
    try:
        return sorted(folder.iterdir(), key=lambda path: path.name, reverse=True)
    except OSError as error:
        raise DataError(
            f"cannot read folder {folder}: {error.strerror}; check the path and its permissions"
        ) from error


def _mode(path: Path) -> int:
    """The `st_mode` of the path's target; 0 for a broken link.

    Raises:
        DataError: a folder on the way may not be entered.
    """
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        raise DataError(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error


def _roots(folder: Path) -> list[Path]:
    """The folders into which links of a folder may lead: the folder itself, and for a snapshot in the hub's
    cache the files that it shares with others."""
    whole = folder.resolve()
    shared = [
        place.parent.parent / "blobs" for place in (whole, *whole.parents) if place.parent.name == "snapshots"
    ]
    return [whole, *shared]


def is_folder(path: Path) -> bool:
    """Whether the path is a folder. Raises DataError if a folder on the way may not be entered."""
    return stat.S_ISDIR(_mode(path))


def standard_library_files() -> Iterator[Path]:
    """The sources of Python's standard library, in a fixed order.

    Raises:
        DataError: there are none.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    has_sources = False
    for path in files_below(folder, _STDLIB_SKIPPED, links=True):
        if path.suffix == ".py":
            has_sources = True
            yield path
    if not has_sources:
        raise DataError(f"this Python has no library sources in {folder}; set [data] path to text")


class NotTextError(DataError):
    """A file that is not UTF-8 text. By itself it is an error; in a folder it is left out."""

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        super().__init__(f"{path} {reason}; {advice}")
        self.reason = f"file that {reason}"


def suffix_of(path: Path) -> str:
    """A file's last suffix in lower case."""
    return path.suffix.lower()


def content_suffix(path: Path) -> str:
    """The suffix for a file's kind, in lower case, without that of its compression."""
    return suffix_of(Path(path.stem)) if suffix_of(path) in COMPRESSED else suffix_of(path)


def without_marks(text: bytes) -> bytes:
    """UTF-8 text without the byte order marks that some programs write at its beginning. Joined files have
    them at the beginning of lines."""
    if codecs.BOM_UTF8 not in text:
        return text
    return text.removeprefix(codecs.BOM_UTF8).replace(b"\n" + codecs.BOM_UTF8, b"\n")


def utf8(text: str) -> bytes:
    """The text in UTF-8. The two halves of a character (surrogates) are joined; a single one is replaced."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def check_regular(path: Path) -> int:
    """The size of a regular file in bytes.

    Raises:
        DataError: the path is a folder, a pipe, a device or the like. It is not opened.
        OSError: the file cannot be examined.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a device or the like"
        raise DataError(f"{path} is {kind}: a regular file is expected")
    return status.st_size


def read_ends(path: Path, size: int) -> bytes:
    """The beginning and the end of a file of `size` bytes. Raises OSError."""
    with path.open("rb") as file:
        ends = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        return ends + file.read(_END_BYTES)


def read_file(path: Path, most: int = MOST_FILE_BYTES) -> bytes:
    """A settings file (JSON, a template) as UTF-8 without a byte order mark.

    Raises:
        DataError: it is no regular file, longer than `most` bytes, UTF-16, or a pointer of Git LFS.
        OSError: it cannot be read.
    """
    if (size := check_regular(path)) > most:
        raise DataError(f"{path} has {size:,} bytes; at most {most:,} are expected: is it the right file?")
    with path.open("rb") as file:
        content = file.read(size)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path} is UTF-16: save it as UTF-8")
    if content.startswith(LFS_POINTER):
        raise DataError(f"{path} is a pointer of Git LFS; fetch the file itself: git lfs pull")
    return content.removeprefix(codecs.BOM_UTF8)


def read_small(path: Path, most: int) -> bytes:
    """`read_file` for a folder that a stranger may have made. Raises DataError also for a link that leads out
    of it."""
    check_link(path)
    return read_file(path, most)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: temporary file, fsync, rename. After an error, such as that of a full disk,
    there is the earlier file or none. A link, a pipe or a device is written to directly.

    Raises OSError with the file's name.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        error.filename = str(path)
        raise


def check_link(path: Path) -> None:
    """Refuse a link that leads out of its folder, which a stranger's folder may contain.

    Links to files beside a hub's snapshots are allowed, because the hub's cache consists of them.

    Raises:
        DataError: the link leads out of its folder.
    """
    folder = Path(os.path.realpath(path.parent))
    own = folder.parent.parent if folder.parent.name == "snapshots" else folder
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(own):
        raise DataError(f"{path} is a link that leads out of its folder: put the file itself there")


def check_kind(path: Path, content: bytes) -> None:
    """Refuse content that begins like UTF-16, a Git LFS pointer or an archive. Raises NotTextError."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise NotTextError(path, "is UTF-16 text, not UTF-8", "save it as UTF-8 or leave it out")
    if content.startswith(LFS_POINTER):
        raise NotTextError(path, "is a pointer of Git LFS", "fetch the file itself: git lfs pull")
    kind = next((kind for kind, magic in _ARCHIVES.items() if content.startswith(magic)), "")
    if kind or content[257:262] == b"ustar":
        kind = kind or "a tar archive"
        raise NotTextError(path, f"is {kind}", "unpack it, give it its suffix, or leave it out")


def checked_text(path: Path, content: bytes) -> bytes:
    """The content without byte order marks.

    Raises:
        NotTextError: it is not UTF-8, or it has zero bytes.
    """
    wrong = at = ""
    try:
        content.decode()
        if SEPARATOR in content:
            wrong = "holds zero bytes"
    except UnicodeDecodeError as error:
        wrong, at = "is not UTF-8 text", f" (byte {error.start})"
    if wrong:
        check_kind(path, content)
        raise NotTextError(path, wrong, f"convert it or leave it out{at}")
    if b"\r\n" in content:
        _say_line_ends(path.parent)
    return without_marks(content)


@cache
def _say_line_ends(folder: Path) -> None:
    logger.warning(
        "text in %s has lines that end with \\r\\n, as on Windows, and the model learns to write both: "
        "convert it (dos2unix) if it should not",
        folder,
    )


class _Zstd:
    """One frame of .zst, with the methods of `lzma.LZMADecompressor`.

    zstandard's own reader does not notice that a file is cut off.
    """

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f'{path} needs the zstandard package: pip install "thinwire[data]"') from error
        self._frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        self._content = io.BytesIO()
        self._left = 0

    @property
    def eof(self) -> bool:
        return self._frame.eof and not self._left

    @property
    def needs_input(self) -> bool:
        return not self._left

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, raw: bytes, most: int) -> bytes:
        if raw:
            content = self._frame.decompress(raw)
            self._content, self._left = io.BytesIO(content), len(content)
        piece = self._content.read(most)
        self._left -= len(piece)
        return piece


class _Decompressed(io.RawIOBase):
    """A compressed file that is decompressed as it is read. Several streams in sequence count as one."""

    def __init__(
        self,
        path: Path,
        make: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor | _Zstd],
        read_bytes: int = _READ_BYTES,
    ) -> None:
        self._codec = make()
        self._file = path.open("rb")
        self._make = make
        self._read_bytes = read_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if self._codec.eof:
                # Zero bytes may pad a stream of .xz.
                raw = self._codec.unused_data.lstrip(b"\0")
                raw = raw or self._file.read(self._read_bytes).lstrip(b"\0")
                if not raw:
                    return 0
                self._codec = self._make()
            else:
                raw = self._file.read(self._read_bytes) if self._codec.needs_input else b""
                if self._codec.needs_input and not raw:
                    raise EOFError("its end is missing")
            data = self._codec.decompress(raw, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Bounded(io.RawIOBase):
    """A decompressed file. Reading raises DataError if it grows more than any text does."""

    def __init__(self, path: Path, content: IO[bytes], compressed_bytes: int) -> None:
        self._path, self._content = path, content
        self._room = max(SURE_BYTES, MOST_EXPANSION * compressed_bytes)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(len(buffer))
        self._room -= len(data)
        if self._room < 0:
            raise DataError(
                f"{self._path} grows to over {MOST_EXPANSION} times its size when it is decompressed, as no "
                "text does: leave it out, or decompress it"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._content.close()
        super().close()


def open_content(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed as they are read.

    Raises:
        OSError: the file cannot be opened.
        DataError: a package is missing, or it is no regular file. Reading raises it if the file expands to
            more than `MOST_EXPANSION` times its size.
    """
    size = check_regular(path)
    if not size:
        return io.BytesIO()  # files of the kernel have size 0 too, and reading one may never end
    match suffix_of(path):
        case ".xz":
            content: Any = _Decompressed(path, lambda: lzma.LZMADecompressor(memlimit=_XZ_BYTES))
        case ".bz2":
            content = _Decompressed(path, bz2.BZ2Decompressor)
        case ".gz":
            content = gzip.GzipFile(path, "rb")
        case ".zst":
            content = _Decompressed(path, lambda: _Zstd(path), _ZSTD_READ_BYTES)
        case _:
            return path.open("rb")
    return io.BufferedReader(_Bounded(path, content, size))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the errors of damaged and unreadable files into DataError."""
    try:
        yield
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is None:  # bz2 raises this
            raise _damaged(path, error) from error
        raise unreadable(path, error) from error
    except Exception as error:  # zstandard may not be installed, so its error is known by name only
        if type(error).__name__ != "ZstdError":
            raise
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    advice = "compress it again, or rename it if its suffix is wrong"
    return DataError(f"{path} is damaged: {error}; {advice}")


def unreadable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        if _ADDRESS.match(str(path)):
            return DataError(f"{path} is an address: download the data to this machine first")
        return DataError(
            f"no file or folder {path}; name text, or {STDLIB}. In a run file it is data.path, data.sources "
            "or data.valid, and data.path=PATH after the command overrides it"
        )
    return DataError(f"cannot read {path}: {error.strerror or error}; check the path and its permissions")


def report_skipped(folder: Path, every: list[Path], taken: list[Path], left_out: Counter[str]) -> None:
    """Warn about the files of a folder that are not trained on, by suffix, and about what `files_below` left
    out."""
    chosen = set(taken)
    kinds = left_out + kinds_of(file for file in every if file not in chosen)
    if kinds:
        logger.warning(
            "training on %d of %d files in %s; skipped: %s",
            len(taken),
            len(every) + left_out.total(),
            folder,
            listed(kinds),
        )


def kinds_of(files: Iterable[Path]) -> Counter[str]:
    """The number of files with each suffix."""
    return Counter(file.suffix or "no suffix" for file in files)


def listed(counts: Mapping[str, int]) -> str:
    """The five most frequent kinds, such as `12 x .pdf, 1 x link out of the folder`."""
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(counts).most_common(5))
