"""Read training text from disk: files, folders, JSONL, compressed or not, and the standard library.

The whole text is held in memory as bytes. Documents are joined by one zero byte, which no text contains: a
file with a zero byte in it is not text. `documents.py` reads what is larger or of other kinds.
"""

import gzip
import io
import json
import logging
import lzma
import os
import stat
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from node.config.schema import DataSection
from wire.errors import ConfigError, DataError, UserError
from wire.identity.files import home

logger = logging.getLogger(__name__)

SEPARATOR = b"\0"
STDLIB = "stdlib"
STDLIB_LIMIT_BYTES = 32 << 20
"""The standard library's text is cut after this many bytes, at the end of a file."""

TEXT_SUFFIXES = frozenset((".txt", ".md", ".rst", ".tex", ".html", ".csv", ".jsonl", ".py", ".c", ".h"))
COMPRESSED = frozenset((".xz", ".gz", ".zst"))
# Not part of every installation, or not the standard library at all.
_STDLIB_SKIPPED = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"))


def expanded(path: str, key: str) -> Path:
    """`path` with a leading `~` or `~user` replaced by that home; `key` is the run-file key that names it.

    Raises ConfigError.
    """
    own, _, below = path.partition("/")
    try:
        return home() / below if own == "~" else Path(path).expanduser()
    except (RuntimeError, UserError):
        raise ConfigError(
            f"{key} {path!r}: this machine knows no home of that user; write the whole path, from / on"
        ) from None


def read_small(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most`.

    Raises:
        DataError: a pipe, a device or a folder; a longer file; a link out of its folder.
        OSError: missing or unreadable.
    """
    check_link(path)
    if not stat.S_ISREG(path.stat().st_mode):
        # To open a pipe that nobody writes to would never return.
        raise DataError(f"{path} is no regular file: put a file in its place")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"{path} has more than {most:,} bytes, which no such file has: copy it again")
    return data


def check_link(path: Path) -> None:
    """Raises DataError for a link that leads out of its folder, which a stranger's folder may hold.

    Links to files beside a hub's snapshots are how its cache is made.
    """
    folder = path.parent
    own = folder.parent.parent if folder.parent.name == "snapshots" else folder
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(own)):
        raise DataError(f"{path} is a link that leads out of its folder: put the file itself there")


def read_text(data: DataSection) -> bytes:
    """All documents of `[data] path`, joined by zero bytes.

    One named file must be text; in a folder, files that are not UTF-8 text are skipped with a warning.

    Raises:
        DataError: missing, unreadable, damaged, not text, empty, or JSONL without the field.
        ConfigError: a home directory of an unknown user.
    """
    if data.path == STDLIB:
        documents = list(_standard_library())
    else:
        path = expanded(data.path, "data.path")
        if _is_folder(path):
            documents = list(_folder(path, data.jsonl_field))
        else:
            documents = _documents(path, data.jsonl_field)
    text = SEPARATOR.join(document for document in documents if document.strip())
    if not text:
        raise DataError(f"no text in {data.path}: all of it is empty or skipped; set [data] path to text")
    return text


def _folder(folder: Path, jsonl_field: str) -> Iterator[bytes]:
    every = list(files_below(folder))
    found = [path for path in every if content_suffix(path) in TEXT_SUFFIXES]
    if not found:
        raise DataError(
            f"no text files in folder {folder}; expected names that end in "
            f"{', '.join(sorted(TEXT_SUFFIXES))}, with or without .xz, .gz or .zst"
        )
    report_skipped(folder, every, found)
    for path in found:
        try:
            documents = _documents(path, jsonl_field)
        except NotTextError as error:
            logger.warning("skipped: %s", error)
            continue
        yield from documents


def files_below(folder: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Visible files at any depth, in the order of their names; links to folders are not followed.

    Args:
        skipped: names of folders not to enter.
    """
    try:
        entries = sorted(folder.iterdir(), key=lambda path: path.name)
    except OSError as error:
        raise DataError(f"cannot read folder {folder}: {error.strerror}; check its permissions") from error
    for path in entries:
        if path.name.startswith(".") or path.name in skipped:
            continue
        if _is_folder(path):
            if not path.is_symlink():
                yield from files_below(path, skipped)
        elif path.is_file():
            yield path


def _is_folder(path: Path) -> bool:
    """Raises DataError where one on the way may not be entered."""
    try:
        return path.is_dir()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def standard_library_files() -> Iterator[Path]:
    """The sources of Python's standard library, in a fixed order. Raises DataError if there are none."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = False
    for path in files_below(folder, _STDLIB_SKIPPED):
        if path.suffix == ".py":
            found = True
            yield path
    if not found:
        raise DataError(f"this Python has no library sources in {folder}; set [data] path to text")


def _standard_library() -> Iterator[bytes]:
    total = 0
    for path in standard_library_files():
        try:
            document = _plain_text(path)
        except NotTextError:
            continue
        total += len(document)
        if total > STDLIB_LIMIT_BYTES:
            return
        yield document


class NotTextError(DataError):
    """A file that is not UTF-8 text: an error by itself, a warning within a folder."""


def content_suffix(path: Path) -> str:
    """The suffix that gives a file's kind, without that of its compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _documents(path: Path, jsonl_field: str) -> list[bytes]:
    text = _plain_text(path)
    return _json_lines(path, text, jsonl_field) if content_suffix(path) == ".jsonl" else [text]


def _plain_text(path: Path) -> bytes:
    content = _content(path)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise NotTextError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it or leave it out"
        ) from error
    if SEPARATOR in content:
        raise NotTextError(f"{path} holds zero bytes, so it is no text; leave it out")
    return content


def _content(path: Path) -> bytes:
    with explained(path), open_content(path) as file:
        return file.read()


def open_content(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed. Raises OSError, DataError for a missing package."""
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".gz":
        return gzip.GzipFile(path, "rb")  # type: ignore[return-value]  # typeshed: no IO
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f'{path} needs the zstandard package: pip install "thinwire[data]"') from error
        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
        return io.BufferedReader(reader)
    return path.open("rb")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what damaged and unreadable files raise into DataError."""
    try:
        yield
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}; compress it again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # zstandard may not be installed, so its error is known by name only
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"{path} is damaged: {error}; compress it again") from error


def unreadable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(
            f"no file or folder {path}; set [data] path to text, or to {STDLIB}; data.path=PATH after the "
            "command overrides it"
        )
    return DataError(f"cannot read {path}: {error.strerror or error}; check its permissions")


def report_skipped(folder: Path, every: list[Path], taken: list[Path]) -> None:
    """Warn about the files of a folder that are not trained on, by suffix."""
    if len(taken) == len(every):
        return
    chosen = set(taken)
    kinds = Counter(file.suffix or "no suffix" for file in every if file not in chosen)
    listed = ", ".join(f"{count} x {suffix}" for suffix, count in kinds.most_common(5))
    logger.warning("training on %d of %d files in %s; skipped: %s", len(taken), len(every), folder, listed)


def _json_lines(path: Path, content: bytes, jsonl_field: str) -> list[bytes]:
    documents = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} line {number} is not JSON ({error}); expected one object") from error
        value = row.get(jsonl_field) if isinstance(row, dict) else None
        if not isinstance(value, str):
            raise DataError(
                f"{path} line {number} has no text in field {jsonl_field!r}; "
                "set [data] jsonl_field to the field that holds it"
            )
        # Escapes may hide what the file itself could not: zero bytes and halves of surrogate pairs.
        documents.append(value.encode("utf-8", "replace").replace(SEPARATOR, b" "))
    return documents
