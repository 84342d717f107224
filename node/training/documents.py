"""List training data and read it shard by shard: text, JSONL, parquet, Arrow, token arrays, folders of these.

A source is a file or folder. Its listing names the files, their sizes and a digest of their ends, and alone
decides how they are cut into shards of about `SHARD_BYTES`: byte ranges of plain files, row groups of
parquet, record batches of Arrow files (which the `datasets` package saves), whole compressed files, and small
files together. So the order of a run follows from the seed and the
listing, before anything is tokenized.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from node.config.schema import DataSection
from node.training.text import (
    COMPRESSED,
    SEPARATOR,
    STDLIB,
    TEXT_SUFFIXES,
    NotTextError,
    content_suffix,
    expanded,
    explained,
    files_below,
    open_content,
    report_skipped,
    standard_library_files,
    unreadable,
)
from wire.errors import DataError

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 20
"""Of text in a shard, about; a first shard is tokenized within seconds."""
TOKEN_BYTES = 8 << 20
"""Of token ids in a shard."""
TOKEN_SUFFIXES = frozenset((".npy", ".bin"))
PARQUET = ".parquet"
ARROW = ".arrow"
TABLES = (PARQUET, ARROW)
_END_BYTES = 1 << 16

BATCH_DOCUMENTS = 64
BATCH_BYTES = 4 << 20
"""Tokenized at once, on all cores, whichever is reached first."""

Row = dict[str, Any]
Batch = list[tuple[str, Row | bytes]]
"""Documents with their places."""


@dataclass(frozen=True)
class Extent:
    """A part of a file: bytes `start` to `stop`, row groups of parquet, or record batches of Arrow."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """What is tokenized at a time; `number` counts along the listing."""

    number: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Source:
    """A file or folder, listed."""

    path: str
    shards: tuple[Shard, ...]
    bytes: int
    skips: bool
    """Whether files that are not text are skipped with a warning: those of a folder are."""
    digest: str
    """Of names, sizes and ends of the files: another listing is another order."""

    @property
    def is_tokens(self) -> bool:
        return self.shards[0].extents[0].path.suffix in TOKEN_SUFFIXES


def list_source(name: str) -> Source:
    """List `name`, a file, a folder or `stdlib`.

    A folder's files of other kinds are counted in a warning. Raises DataError, ConfigError.
    """
    files, base = _files(name)
    extents: list[list[Extent]] = []
    room = 0
    digest = sha256()
    total = 0
    for path in files:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                ends = file.read(_END_BYTES)
                file.seek(max(0, size - _END_BYTES))
                ends += file.read(_END_BYTES)
        except OSError as error:
            raise unreadable(path, error) from error
        total += size
        relative = str(path.relative_to(base)) if base else path.name
        digest.update(sha256(repr((relative, size)).encode() + ends).digest())
        for extent in _extents(path, size):
            small = extent.start == 0 and extent.stop == size < SHARD_BYTES and _is_plain(path)
            if small and room >= size:
                extents[-1].append(extent)
            else:
                extents.append([extent])
                room = SHARD_BYTES if small else 0
            room -= size
    shards = tuple(Shard(number, tuple(several)) for number, several in enumerate(extents))
    if not shards:
        raise DataError(f"no data in {name}: all of its files are empty")
    return Source(name, shards, total, len(files) > 1, digest.hexdigest())


def read_rows(shard: Shard, *, chat: bool, skips: bool) -> Iterator[tuple[str, Row | bytes]]:
    """The documents of a shard with their places for messages: texts as bytes, or with fields as rows.

    Args:
        chat: only JSONL and parquet hold conversations.
        skips: skip files that are not text with a warning.

    Raises:
        DataError: damaged files and files that are not text.
    """
    for extent in shard.extents:
        suffix = content_suffix(extent.path)
        if suffix == PARQUET:
            yield from _parquet_rows(extent)
        elif suffix == ARROW:
            yield from _arrow_rows(extent)
        elif suffix == ".jsonl":
            yield from _json_rows(extent)
        elif chat:
            raise DataError(f"{extent.path}: chat data must be JSONL, parquet or Arrow")
        else:
            try:
                yield from ((str(extent.path), text) for text in _texts(extent))
            except NotTextError as error:
                if not skips:
                    raise
                logger.warning("skipped: %s", error)


def text_of(row: Row | bytes, place: str, data: DataSection) -> bytes:
    """A document's text in UTF-8. Raises DataError if the row has no such field."""
    if isinstance(row, bytes):
        return row
    value = row.get(data.jsonl_field)
    if not isinstance(value, str):
        raise DataError(
            f"{place} has no text in field {data.jsonl_field!r}; set [data] jsonl_field to the field that "
            f"holds it, of {', '.join(map(str, row))}"
        )
    # Escapes may stand for zero bytes and halves of surrogate pairs, which a text file cannot contain.
    return value.encode("utf-8", "replace").replace(SEPARATOR, b" ")


def batches(rows: Iterator[tuple[str, Row | bytes]]) -> Iterator[Batch]:
    """The same documents, as many at a time as are tokenized at once."""
    batch: Batch = []
    size = 0
    for place, row in rows:
        batch.append((place, row))
        size += (
            len(row) if isinstance(row, bytes) else sum(len(one) for one in row.values() if type(one) is str)
        )
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def is_data(path: Path) -> bool:
    """Whether this is a file that a folder contributes."""
    return content_suffix(path) in TEXT_SUFFIXES or path.suffix in TABLES


def _files(name: str) -> tuple[list[Path], Path | None]:
    if name == STDLIB:
        return list(standard_library_files()), None
    path = expanded(name, "data.sources")
    if not path.is_dir():
        return [path], None
    every = list(files_below(path))
    found = [file for file in every if is_data(file)]
    tokens = [file for file in every if file.suffix in TOKEN_SUFFIXES]
    if tokens and not found:
        found = tokens
    if not found:
        raise DataError(f"no data in folder {path}; expected text, JSONL, parquet, Arrow, .npy or .bin")
    report_skipped(path, every, found)
    return found, path


def is_shards_only(path: Path) -> bool:
    """Whether `path` is a table or token ids, or a folder with such files and no text: not read as a
    whole."""
    if not path.is_dir():
        return path.suffix in (*TABLES, *TOKEN_SUFFIXES)
    files = list(files_below(path))
    return not any(content_suffix(file) in TEXT_SUFFIXES for file in files) and any(
        file.suffix in (*TABLES, *TOKEN_SUFFIXES) for file in files
    )


def _is_plain(path: Path) -> bool:
    return path.suffix not in COMPRESSED and path.suffix not in TABLES and path.suffix not in TOKEN_SUFFIXES


def _extents(path: Path, size: int) -> Iterator[Extent]:
    if size == 0:
        return
    if path.suffix == PARQUET:
        yield from (Extent(path, group, group + 1) for group in range(_row_groups(path)))
    elif path.suffix == ARROW:
        yield from _arrow_extents(path)
    elif path.suffix in TOKEN_SUFFIXES:
        yield from (
            Extent(path, start, min(size, start + TOKEN_BYTES)) for start in range(0, size, TOKEN_BYTES)
        )
    elif _is_plain(path):
        yield from (
            Extent(path, start, min(size, start + SHARD_BYTES)) for start in range(0, size, SHARD_BYTES)
        )
    else:
        yield Extent(path, 0, size)


def _lines(extent: Extent) -> Iterator[tuple[int, bytes]]:
    """Lines that begin inside the extent, each with its number or its offset."""
    with explained(extent.path), open_content(extent.path) as file:
        if not _is_plain(extent.path):
            yield from enumerate(file, start=1)
            return
        if extent.start:
            file.seek(extent.start - 1)
            file.readline()
        number = 0
        while (at := file.tell()) < extent.stop and (line := file.readline()):
            number += 1
            yield (number if extent.start == 0 else at), line


def _json_rows(extent: Extent) -> Iterator[tuple[str, Row]]:
    unit = "line" if extent.start == 0 else "byte"
    for at, line in _lines(extent):
        if not line.strip():
            continue
        place = f"{extent.path} {unit} {at}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON ({error}); expected one object") from error
        if not isinstance(row, dict):
            raise DataError(f"{place} is not a JSON object")
        yield place, row


def _texts(extent: Extent) -> Iterator[bytes]:
    """The text that begins in the extent: cut where lines begin, in compressed files by size."""
    kept: list[bytes] = []
    size = 0
    for _, line in _lines(extent):
        kept.append(line)
        size += len(line)
        if size >= SHARD_BYTES and not _is_plain(extent.path):
            yield _checked(extent.path, b"".join(kept))
            kept, size = [], 0
    if size:
        yield _checked(extent.path, b"".join(kept))


def _checked(path: Path, text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise NotTextError(
            f"{path} is not UTF-8 text ({error.reason}); convert it or leave it out"
        ) from error
    if SEPARATOR in text:
        raise NotTextError(f"{path} holds zero bytes, so it is not text; leave it out")
    return text


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{path} needs the pyarrow package: pip install "thinwire[data]"') from error
    return pyarrow


@contextmanager
def _table(path: Path, kind: str) -> Iterator[Any]:
    """pyarrow, for reading a file of this kind. Raises DataError for what it raises, and without it."""
    pyarrow = _pyarrow(path)
    try:
        yield pyarrow
    except FileNotFoundError as error:
        raise unreadable(path, error) from error
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not {kind}, or damaged ({' '.join(str(error).split())})") from error


def _row_groups(path: Path) -> int:
    with _table(path, "parquet") as pyarrow, pyarrow.parquet.ParquetFile(path) as file:
        return int(file.num_row_groups)


def _parquet_rows(extent: Extent) -> Iterator[tuple[str, Row]]:
    with _table(extent.path, "parquet") as pyarrow, pyarrow.parquet.ParquetFile(extent.path) as file:
        groups = range(extent.start, min(extent.stop, file.num_row_groups))
        number = 0
        for batch in file.iter_batches(batch_size=256, row_groups=list(groups)):
            for row in batch.to_pylist():
                number += 1
                yield f"{extent.path} row group {extent.start} row {number}", row


def _arrow_batches(path: Path) -> Iterator[Any]:
    """The record batches of an Arrow file or stream, mapped: those that are skipped are not read."""
    with _table(path, "an Arrow file") as pyarrow, pyarrow.memory_map(str(path)) as file:
        try:
            reader = pyarrow.ipc.open_file(file)
        except pyarrow.ArrowInvalid:  # as `datasets` writes them, to append to
            file.seek(0)
            yield from pyarrow.ipc.open_stream(file)
            return
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _arrow_extents(path: Path) -> Iterator[Extent]:
    start = size = number = 0
    for number, batch in enumerate(_arrow_batches(path), start=1):
        size += batch.nbytes
        if size >= SHARD_BYTES:
            yield Extent(path, start, number)
            start, size = number, 0
    if number > start:
        yield Extent(path, start, number)


def _arrow_rows(extent: Extent) -> Iterator[tuple[str, Row]]:
    for number, batch in enumerate(islice(_arrow_batches(extent.path), extent.stop)):
        for first in range(0, batch.num_rows if number >= extent.start else 0, 256):
            for row, values in enumerate(batch.slice(first, 256).to_pylist(), start=first + 1):
                yield f"{extent.path} batch {number} row {row}", values
