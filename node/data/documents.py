"""Lists training data and reads it shard by shard: text, JSONL, parquet, Arrow, token arrays, and folders of
these.

A source is a file or folder. Its listing has the names of its files, their sizes and a digest of their ends.
Only the listing determines how the files are cut into shards of about `SHARD_BYTES`: byte ranges of plain
files, row groups of parquet, record batches of Arrow files (which the `datasets` package saves), whole
compressed files, and several small files or row groups together, because what is left at a shard's end is in
no sample. So a run's order follows from the seed and the listing, before anything is tokenized.
"""

import csv
import io
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

from node.config.schema import DataSection
from node.data.conversations import (
    ANSWERS,
    HISTORY,
    INPUTS,
    KIND,
    MASK,
    MEDIA,
    MESSAGES,
    PREFERENCES,
    QUESTIONS,
    ROW_MARKS,
    SETTINGS,
    SYSTEMS,
    TAGS,
    TOOLS,
    Dropped,
    refuse_preferences,
)
from node.data.parts import DATA_CARD, check_parts, settings_of
from node.data.text import (
    ARROW,
    COMPRESSED,
    JSON_SUFFIXES,
    LFS_POINTER,
    PARQUET,
    SEPARATOR,
    STDLIB,
    STDLIB_LIMIT_BYTES,
    TABLES,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    NotTextError,
    check_kind,
    check_regular,
    checked_text,
    content_suffix,
    expanded,
    explained,
    files_below,
    is_folder,
    kinds_of,
    listed,
    open_content,
    read_ends,
    report_skipped,
    standard_library_files,
    suffix_of,
    unreadable,
    utf8,
    without_marks,
)
from wire.errors import DataError

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 20
"""The approximate text size of a shard. The first shard is tokenized within seconds."""
TOKEN_BYTES = 8 << 20
"""The size of a shard of token ids, in bytes."""
SMALL_BYTES = 256 << 10
"""Compressed files, tables, token files and row groups below this size are joined to shards."""
PAIR_COLUMNS = frozenset((*QUESTIONS, *INPUTS, *ANSWERS, HISTORY))
_BESIDE = (SETTINGS, MASK, KIND, *TOOLS, "documents")
CHAT_COLUMNS = frozenset((*MESSAGES, *SYSTEMS, *MEDIA, *TAGS, *PREFERENCES, *ROW_MARKS, *_BESIDE))
"""The columns that are read from tables of conversations. No other column is converted."""
MOST_BYTES = 128 << 20
"""The most bytes of a line, a row or a document. A longer one is an error, so that a small compressed file
cannot fill the memory."""
MOST_BLANK_BYTES = 4 << 20
"""The most bytes of empty lines in a file."""
LARGE_BYTES = 2_000_000_000
"""A text source of this size is read in shards unless `[data] order` says otherwise."""
TOKEN_IDS = "input_ids"
"""The column of rows that were tokenized, as transformers has it."""
UNLABELLED = -100
"""The label of a token that has none, as transformers has it."""
FIELD_KEYS = "data.jsonl_field; --field of `thinwire data tokenizer`"
"""Where the field with the text is named."""
_ROW_BYTES = 100
"""The approximate memory that a row needs besides its text."""
_VALUE_SUFFIXES = (".csv", ".tsv")
"""Suffixes of tables of values. The first line may name the columns."""
_TABLE_LINES = 20
"""This many lines with the same number of values make a table."""
_JSON_BEGINS = re.compile(rb'(?:\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')
_PARQUET_SEAM = b"PAR1PAR1"
"""The end of a parquet file and the beginning of another."""
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_SPACE = re.compile(r"[ \t\r\n]*")


def _constant(name: str) -> float | None:
    """A number that JSON does not have. pandas writes NaN for a field that a row does not have."""
    return None if name == "NaN" else float(name)


_DECODER = json.JSONDecoder(parse_constant=_constant)
_TEXT_TYPE = re.compile(
    r"null|(?:dictionary<values=)?(?:large_)?(?:string|binary)(?:_view)?(?:, .*>)?|fixed_size_binary\[.*"
)
_JSON_TYPE, _MAP_TYPE = "extension<arrow.json>", "map<"
_KINDS: dict[type, str] = {
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_HEAD_BYTES = 1 << 20
_TABLE_ROWS = 8
"""The rows that are converted at a time. A dictionary-encoded column may repeat a long text in every row."""

BATCH_DOCUMENTS = 64
BATCH_BYTES = 4 << 20
"""Batches for tokenizing end at this many documents or bytes, whichever comes first. All cores work on one
batch."""

Row = dict[str, Any]
Document = Row | bytes | Dropped
"""A row with fields, a text, or the reason why there is none."""
Batch = list[tuple[str, Document]]


@dataclass(frozen=True)
class Extent:
    """A part of a file: bytes `start` to `stop`, row groups of parquet, or record batches of Arrow."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """The unit of tokenizing. `number` counts along the listing."""

    number: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Source:
    """A listed file or folder."""

    path: str
    shards: tuple[Shard, ...]
    bytes: int
    skips: bool
    """Whether files that are not text are skipped with a warning. It is true for folders."""
    digest: str
    """A digest of the files' names, sizes and ends. Another listing means another order."""
    times: Mapping[Path, int]
    """The files' modification times in nanoseconds."""

    @property
    def stamps(self) -> str:
        """A digest of the modification times, because tokens of files that changed in the middle must not be
        reused."""
        return sha256("".join(f"{time} " for time in self.times.values()).encode()).hexdigest()

    @property
    def is_tokens(self) -> bool:
        return suffix_of(self.shards[0].extents[0].path) in TOKEN_SUFFIXES


def list_source(name: str) -> Source:
    """List `name`: a file, a folder or `stdlib`.

    A warning counts the files of a folder that have other kinds.

    Raises:
        DataError: the files are missing, unreadable, damaged or empty.
        ConfigError: the path names the home directory of an unknown user.
    """
    files, base = _files(name)
    extents: list[list[Extent]] = []
    room = 0
    digest, times = sha256(), dict[Path, int]()
    total = 0
    for path in files:
        try:
            size = check_regular(path)
            times[path] = path.stat().st_mtime_ns
            ends = read_ends(path, size)
        except OSError as error:
            raise unreadable(path, error) from error
        total += size
        relative = str(path.relative_to(base)) if base else path.name
        digest.update(sha256(repr((relative, size)).encode() + ends).digest())
        cuts = list(_extents(path, size))
        small = len(cuts) == 1 and size < (SHARD_BYTES if _is_plain(path) else SMALL_BYTES)
        for extent in cuts:
            if small and room >= size:
                extents[-1].append(extent)
            else:
                extents.append([extent])
                room = SHARD_BYTES if small else 0
            room -= size
    shards = tuple(Shard(number, tuple(several)) for number, several in enumerate(extents))
    if not shards:
        raise DataError(f"no data in {name}: all of its files are empty")
    if any(map(_was_several, shards)):
        # A run that an earlier version began had other samples.
        digest.update(b"joined")
    return Source(name, shards, total, base is not None or len(files) > 1, digest.hexdigest(), times)


def check_unchanged(source: Source, shard: Shard) -> None:
    """Warn, once, of a file that changed since it was listed.

    Raises:
        DataError: a token file is shorter. Its tokens are mapped, and reading them would end the process.
    """
    for extent in shard.extents:
        try:
            status = extent.path.stat()
        except OSError:
            continue  # reading it reports the error
        if status.st_mtime_ns != source.times[extent.path]:
            _say_changed(extent.path)
        if status.st_size < extent.stop and suffix_of(extent.path) in TOKEN_SUFFIXES:
            raise _shorter(extent.path)


@cache
def _say_changed(path: Path) -> None:
    logger.warning(
        "%s was changed while the run reads it: samples may be cut in wrong places, and `resume` may refuse "
        "the text. Leave a run's data alone until it has ended",
        path,
    )


def _shorter(path: Path) -> DataError:
    return DataError(f"{path} is shorter than at the start: restore it, and resume the run")


def _was_several(shard: Shard) -> bool:
    """Whether earlier versions made several shards of this one: they joined plain files only."""
    first, *others = shard.extents
    if others:
        return not all(_is_plain(extent.path) for extent in shard.extents)
    return content_suffix(first.path) == PARQUET and first.stop - first.start > 1


def read_rows(shard: Shard, data: DataSection, *, skips: bool) -> Iterator[tuple[str, Document]]:
    """The documents of a shard with their places for messages. Texts are bytes; rows with fields are
    dictionaries.

    Args:
        data: says whether documents are conversations, which only JSON and tables hold. Only the needed
            columns of tables are read.
        skips: leave out files that are not text, with a warning.

    Raises:
        DataError: a file is damaged or not text, or a row cannot be read.
    """
    chat = data.format == "chat"
    for extent in shard.extents:
        suffix = content_suffix(extent.path)
        if suffix == PARQUET:
            yield from _parquet_rows(extent, data)
        elif suffix == ARROW:
            yield from _arrow_rows(extent, data)
        elif suffix in JSON_SUFFIXES:
            yield from _json_rows(extent)
        elif chat:
            raise DataError(f"{extent.path}: chat data must be JSONL, JSON, parquet or Arrow")
        else:
            texts = ((str(extent.path), text) for text in _texts(extent, data.jsonl_field))
            yield from _left_out(extent.path, texts, skips)


def read_text(data: DataSection, dropped: Counter[str] | None = None) -> bytes:
    """All documents of `[data] path`, joined by zero bytes.

    A single file must be text. In a folder, files that are not UTF-8 text are left out with a warning.

    Args:
        dropped: counts the documents that are left out, by reason.

    Raises:
        DataError: missing, unreadable, damaged, not text, empty, too large, or rows without the field.
        ConfigError: a home directory of an unknown user.
    """
    if data.path == STDLIB:
        documents = list(_standard_library())
    else:
        dropped = Counter() if dropped is None else dropped
        path = expanded(data.path, "data.path")
        left_out: Counter[str] = Counter()
        if (whole := is_folder(path)) and not (files := _text_files(path, left_out)):
            raise DataError(
                f"no text files in folder {path}{_skipped(left_out)}; expected names that end in "
                f"{', '.join(sorted(TEXT_SUFFIXES | JSON_SUFFIXES))}, with or without "
                f"{', '.join(sorted(COMPRESSED))}; or {' or '.join(TABLES)}, unless data.order is whole"
            )
        documents = list(_whole(files if whole else [path], data, dropped, skips=whole))
    text = SEPARATOR.join(document for document in documents if document.strip())
    if not text:
        raise nothing_left(data.path, dropped or {})
    return text


def nothing_left(path: str, dropped: Mapping[str, int]) -> DataError:
    """The error for a source without a document that can be trained on. `dropped` has the reasons."""
    if not dropped:
        return DataError(f"no text in {path}: all of it is empty; set [data] path to text")
    return DataError(
        f"no text in {path}: every document is left out ({listed(dropped)}); repair them, or name other data"
    )


def _whole(files: list[Path], data: DataSection, dropped: Counter[str], *, skips: bool) -> Iterator[bytes]:
    """The texts of files. A file without rows is one text.

    Raises:
        DataError: they do not fit in memory, or a file cannot be read.
    """
    room = LARGE_BYTES if data.order == "auto" else sys.maxsize
    for path in files:
        if suffix_of(path) in TABLES:
            raise DataError(f'{path} is a table: set [data] order to "shards" to read it')
        rows: Iterator[tuple[str, Document]]
        if content_suffix(path) in JSON_SUFFIXES:
            rows = _json_rows(Extent(path, 0, sys.maxsize))
        else:
            rows = _left_out(path, _whole_text(path, room, data.jsonl_field), skips)
        packed = suffix_of(path) in COMPRESSED
        most = room if packed else sys.maxsize
        for place, row in rows:
            try:
                text = text_of(row, place, data)
            except Dropped as reason:
                dropped[str(reason)] += 1
                continue
            most -= len(text) + _ROW_BYTES
            if most < 0:
                raise _too_large(path)
            room -= len(text) if packed else 0
            yield text


def _whole_text(path: Path, room: int, field: str) -> Iterator[tuple[str, bytes]]:
    # The size of a compressed file does not bound the size of its text.
    most = room if suffix_of(path) in COMPRESSED else sys.maxsize
    content = bytearray()
    with explained(path), open_content(path) as file:
        while piece := file.read(_HEAD_BYTES):
            content += piece
            if len(content) > most:
                raise _too_large(path)
    _check_no_rows(path, bytes(content[:_HEAD_BYTES]), field)
    yield str(path), checked_text(path, bytes(content))


def _too_large(path: Path) -> DataError:
    return DataError(
        f'{path} is too large to be held in memory once it is decompressed: set [data] order to "shards", '
        "which reads it piece by piece, or decompress it"
    )


def _left_out(
    path: Path, texts: Iterator[tuple[str, Document]], skips: bool
) -> Iterator[tuple[str, Document]]:
    """The texts of a file. With `skips`, a file that is not text is left out with a warning."""
    try:
        yield from texts
    except NotTextError as error:
        if not skips:
            raise
        logger.warning("skipped: %s", error)
        yield str(path), Dropped(error.reason)


def _standard_library() -> Iterator[bytes]:
    total = 0
    for path in standard_library_files():
        try:
            document = checked_text(path, path.read_bytes())
        except NotTextError:
            continue
        except OSError as error:
            raise unreadable(path, error) from error
        total += len(document)
        if total > STDLIB_LIMIT_BYTES:
            return
        yield document


def text_of(row: Document, place: str, data: DataSection) -> bytes:
    """A document's text in UTF-8.

    Raises:
        Dropped: it has no text.
        DataError: the field holds no text, or the text is too long.
    """
    if isinstance(row, Dropped):
        raise row
    if isinstance(row, bytes):
        text = row
    else:
        field = data.jsonl_field
        value = row.get(field)
        if value is None and field in row:
            raise Dropped("null")
        if not isinstance(value, str):
            actual = (
                f"it is {_KINDS.get(type(value), 'no text')}" if field in row else f"it has {_names(row)}"
            )
            raise DataError(
                f"{place} has no text in field {field!r} ({actual}): repair or remove that row, or name the "
                f"field that holds the text ({FIELD_KEYS}){_advice(row)}"
            )
        if not value.strip():  # spaces of other scripts too
            raise Dropped("empty")
        # Escapes may encode zero bytes and unpaired surrogates, which a text file cannot contain.
        text = without_marks(utf8(value).replace(SEPARATOR, b" "))
    if len(text) > MOST_BYTES:
        raise DataError(f"{place} is a text of over {MOST_BYTES >> 20} MiB: cut it into several")
    if not text.strip():
        raise Dropped("empty")
    return text


def _advice(names: Iterable[str]) -> str:
    """Advice for rows with these fields or columns, if they look like conversations or tokens; else empty."""
    known = set(names)
    if known & {*MESSAGES} or (known & {*QUESTIONS, *INPUTS} and known & {*ANSWERS}):
        return (
            '; or, if rows are conversations, set data.format to "chat" (--chat of `thinwire data tokenizer`)'
        )
    if TOKEN_IDS in known:
        return "; or write the token ids to a .npy file, where each is a label, too"
    return ""


@cache
def _say_tokens(path: Path) -> None:
    logger.warning(
        "%s has labels of tokens, which are not read: tokens and labels are made from the text or the "
        "messages of its rows",
        path,
    )


def _names(names: Iterable[Any]) -> str:
    """The first names, for messages."""
    return ", ".join(repr(str(name)[:40]) for name in islice(names, 20)) or "no fields"


def batches(rows: Iterator[tuple[str, Document]]) -> Iterator[Batch]:
    """The documents in batches that are tokenized at once."""
    batch: Batch = []
    size = 0
    for place, row in rows:
        batch.append((place, row))
        size += _size(row)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(row: Document) -> int:
    if isinstance(row, dict):
        return sum(len(value) for value in row.values() if type(value) is str)
    return len(row) if isinstance(row, bytes) else 0


def _without_cards(files: list[Path]) -> list[Path]:
    """The files without the page that describes them, if any of them hold rows."""
    if all(content_suffix(path) not in (*TABLES, *JSON_SUFFIXES) for path in files):
        return files
    return [path for path in files if path.name.lower() != DATA_CARD]


def _is_text(path: Path) -> bool:
    suffix = content_suffix(path)
    # Settings have the suffix .json too.
    return suffix in TEXT_SUFFIXES or (suffix in JSON_SUFFIXES and (suffix != ".json" or _has_rows(path)))


def _text_files(folder: Path, left_out: Counter[str]) -> list[Path]:
    every = list(files_below(folder, left_out=left_out))
    chosen = _without_cards([path for path in every if _is_text(path)])
    if chosen:
        check_parts(folder, every, chosen)
        report_skipped(folder, every, chosen, left_out)
    else:
        left_out += kinds_of(every)
    return chosen


def _files(name: str) -> tuple[list[Path], Path | None]:
    if name == STDLIB:
        return list(standard_library_files()), None
    path = expanded(name, "data.sources")
    if not is_folder(path):
        return [path], None
    left_out: Counter[str] = Counter()
    every = list(files_below(path, left_out=left_out))
    caches = _caches(every)
    chosen = _without_cards(
        [file for file in every if file not in caches and (_is_text(file) or suffix_of(file) in TABLES)]
    )
    tokens = [file for file in every if suffix_of(file) in TOKEN_SUFFIXES]
    if tokens and not chosen:
        chosen = tokens
    if not chosen:
        raise DataError(
            f"no data in folder {path}{_skipped(left_out + kinds_of(every))}; expected text, JSONL, parquet, "
            "Arrow, .npy or .bin"
        )
    check_parts(path, every, chosen)
    report_skipped(path, every, chosen, left_out)
    return chosen, path


def _skipped(left_out: Counter[str]) -> str:
    """What `files_below` left out of a folder, for messages."""
    return f" (skipped: {listed(left_out)})" if left_out else ""


def _caches(every: list[Path]) -> set[Path]:
    """Arrow files that are not rows of a data set, but were left by processing steps of the `datasets`
    package."""
    caches = {path for path in every if path.name.startswith("cache-") and suffix_of(path) == ARROW}
    for path in every:
        if path.name == "state.json" and "_data_files" in (state := settings_of(path)):
            caches |= _beside(path.parent, state, every)
    return caches


def _beside(folder: Path, state: Mapping[str, Any], every: list[Path]) -> set[Path]:
    """The Arrow files in a saved data set's folder that its `state.json` does not list."""
    listed_files = state["_data_files"]
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"the data set in {folder} is saved with an index that picks its rows: save it again after "
            "flatten_indices()"
        )
    try:
        names = {str(file["filename"]) for file in listed_files}
    except (TypeError, KeyError):
        raise DataError(f"{folder / 'state.json'} is damaged: save the data set again") from None
    present = {path for path in every if path.parent == folder and suffix_of(path) == ARROW}
    if missing := names - {path.name for path in present}:
        raise DataError(
            f"{folder} lacks {_names(sorted(missing))}, which its state.json lists: copy it again"
        )
    return {path for path in present if path.name not in names}


def needs_shards(path: Path) -> bool:
    """Whether `path` cannot be read as a whole: it is a table or token ids, a folder with tables, or one with
    token ids and no text."""
    if not is_folder(path):
        return suffix_of(path) in (*TABLES, *TOKEN_SUFFIXES)
    files = list(files_below(path))
    kinds = set(map(suffix_of, files))
    return not kinds.isdisjoint(TABLES) or (
        not kinds.isdisjoint(TOKEN_SUFFIXES) and not any(map(_is_text, files))
    )


def _is_plain(path: Path) -> bool:
    return suffix_of(path) not in (*COMPRESSED, *TABLES, *TOKEN_SUFFIXES)


def _extents(path: Path, size: int) -> Iterator[Extent]:
    suffix = suffix_of(path)
    if size == 0:
        return
    if suffix == PARQUET:
        yield from _joined(path, _row_groups(path), SMALL_BYTES)
    elif suffix == ARROW:
        yield from _joined(path, (batch.nbytes for batch in _arrow_batches(path)), SHARD_BYTES)
    elif suffix in TOKEN_SUFFIXES:
        yield from (
            Extent(path, start, min(size, start + TOKEN_BYTES)) for start in range(0, size, TOKEN_BYTES)
        )
    elif _is_plain(path) and not (suffix in JSON_SUFFIXES and _is_array(_head(path))):
        yield from (
            Extent(path, start, min(size, start + SHARD_BYTES)) for start in range(0, size, SHARD_BYTES)
        )
    else:
        yield Extent(path, 0, size)


def _joined(path: Path, sizes: Iterable[int], least: int) -> Iterator[Extent]:
    """Extents of consecutive row groups or record batches, each of at least `least` bytes except the last."""
    start = size = number = 0
    for number, added in enumerate(sizes, start=1):
        size += added
        if size >= least:
            yield Extent(path, start, number)
            start, size = number, 0
    if number > start:
        yield Extent(path, start, number)


def _head(path: Path) -> bytes:
    """The first mebibyte of a file's content, without a byte order mark and leading white space."""
    with explained(path), open_content(path) as file:
        return without_marks(file.read(_HEAD_BYTES)).lstrip()


def _is_array(head: bytes) -> bool:
    """Whether the file is an array of rows. Lines may be lists, too, each of a conversation's messages."""
    first, _, rest = head.partition(b"\n")
    return head.startswith(b"[") and not (rest.strip() and _is_json(first))


def _has_rows(path: Path) -> bool:
    """Whether a .json file holds an array of objects, or several objects, one per line."""
    head = _head(path)
    first, _, rest = head.partition(b"\n")
    if _is_array(head):
        return head.lstrip(b"[ \t\r\n").startswith(b"{")
    return head.lstrip(b"[ ").startswith(b"{") and (
        len(first) == _HEAD_BYTES or (_is_json(first) and bool(rest.strip()))
    )


def _is_json(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _check_no_rows(path: Path, head: bytes, field: str) -> None:
    """Refuse files that only look like text.

    Raises:
        NotTextError: the file is a pointer to another file, a table of values, or JSON (or JSON values one
            after another) under another suffix.
    """
    head = without_marks(head).lstrip()
    if head.startswith(LFS_POINTER):
        check_kind(path, head)
    if content_suffix(path) in _VALUE_SUFFIXES and (names := _value_names(head, field)):
        raise NotTextError(
            path,
            f"is a table of {_names(names)}",
            "save it as JSONL or parquet to read a column, name it .txt to read its lines, or leave it out",
        )
    if not head.startswith((b"[", b"{")):
        return
    whole = len(head) < _HEAD_BYTES // 2
    text, at, values = head.decode("utf-8", "replace"), 0, 0
    try:
        while values < 8 and at < len(text):
            value, end = _DECODER.raw_decode(text, at)
            if not isinstance(value, dict | list):
                return
            at, values = _SPACE.match(text, end).end(), values + 1  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        # The last value in the head may be cut off.
        if whole or not (values or _JSON_BEGINS.match(head)) or text[at] not in "[{":
            return
    raise NotTextError(
        path,
        "holds JSON, not text",
        "name it .jsonl (an object a line) or .json (an array) to read its rows, or leave it out",
    )


def _value_names(head: bytes, field: str) -> list[str]:
    """The names in the first line of a table of values; empty if it is none."""
    lines = head.decode("utf-8", "replace").splitlines(keepends=True)
    for mark in ",;\t|":
        rows: list[list[str]] = []
        with suppress(csv.Error):  # of a value that is too long for it
            rows.extend(filter(None, islice(csv.reader(lines, delimiter=mark), _TABLE_LINES)))
        if len(rows) < _TABLE_LINES and len(head) > _HEAD_BYTES // 2:
            rows = rows[:-1]  # the last one may be cut
        names = [name.strip() for name in rows[0]] if rows else []
        if field in names or (len(rows) > 1 and len(names) > 1 and {*map(len, rows)} == {len(names)}):
            return names
    return []


def _lines(extent: Extent) -> Iterator[tuple[int, bytes]]:
    """The lines that begin inside the extent, each with its number or its offset."""
    with _opened(extent) as (file, at):
        number, plain = 0, _is_plain(extent.path)
        while at < extent.stop and (line := _rest_of_line(file, extent.path)):
            number += 1
            yield (number if extent.start == 0 else at), line
            at += len(line) if plain else 0


@contextmanager
def _opened(extent: Extent) -> Iterator[tuple[IO[bytes], int]]:
    """The file, positioned at the first line that begins in the extent, and that position; 0 in compressed
    files."""
    with explained(extent.path), open_content(extent.path) as file:
        if extent.path.stat().st_size < extent.stop < sys.maxsize:
            raise _shorter(extent.path)
        at = extent.start
        if at:
            file.seek(at - 1)
            while piece := file.readline(_HEAD_BYTES):
                if piece.endswith(b"\n"):
                    break
            at = file.tell()
        yield file, at


def _rest_of_line(file: IO[bytes], path: Path) -> bytes:
    line = file.readline(MOST_BYTES + 1)
    if len(line) > MOST_BYTES:
        raise DataError(
            f"{path} has a line of over {MOST_BYTES >> 20} MiB: break it into several, or leave it out"
        )
    return line


def _json_rows(extent: Extent) -> Iterator[tuple[str, Document]]:
    head = _head(extent.path)
    check_kind(extent.path, head)
    if _is_array(head):
        rows = _array_rows(extent.path)
    elif content_suffix(extent.path) == ".json" and not _is_json(head.partition(b"\n")[0]) and b"\n" in head:
        raise DataError(
            f"{extent.path} is neither an array of JSON objects nor one object a line: write its rows so"
        )
    else:
        rows = _line_rows(extent)
    for place, row in rows:
        if row is None:
            yield place, Dropped("null")
        elif _are_messages(row):
            yield place, {MESSAGES[0]: row}
        elif isinstance(row, dict):
            labels = row.get("labels")
            # Others are classes of a text.
            if labels and (TOKEN_IDS in row or (isinstance(labels, list) and UNLABELLED in labels)):
                _say_tokens(extent.path)
            yield place, row
        else:
            raise DataError(f"{place} is not a JSON object but {_KINDS[type(row)]}: repair or remove it")


def _are_messages(row: Any) -> bool:
    first = row[0] if isinstance(row, list) and row else None
    return isinstance(first, dict) and not {"role", "from"}.isdisjoint(first)


def _line_rows(extent: Extent) -> Iterator[tuple[str, Any]]:
    unit = "line" if extent.start == 0 else "byte"
    blank = 0
    for at, line in _lines(extent):
        if not line.strip():
            blank += len(line)
            if blank > MOST_BLANK_BYTES:
                raise DataError(
                    f"{extent.path} has over {MOST_BLANK_BYTES >> 20} MiB of empty lines: remove them"
                )
            continue
        place = f"{extent.path} {unit} {at}"
        try:
            # Decoded here, because `json` takes bytes with zeros for UTF-16.
            yield place, _DECODER.decode(line.decode("utf-8-sig", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            advice = "repair or remove it"
            if b"\0" in line:
                advice = "it holds zero bytes, so write the file again, in UTF-8"
            elif isinstance(error, UnicodeDecodeError):
                advice = "write the file again, in UTF-8"
            elif isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
                advice = "remove what follows the first value, or begin a line there"
            raise DataError(f"{place} is not JSON ({error}); expected one object a line: {advice}") from error


def _array_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The elements of a JSON array, read piece by piece."""
    number, text, at = 0, "", 0
    before = "["
    with explained(path), open_content(path) as file:
        stream = io.TextIOWrapper(file, encoding="utf-8-sig")
        try:
            while True:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
                if at == len(text):
                    text, at = stream.read(_HEAD_BYTES), 0
                    if not text:
                        raise _bad_array(path, number, "the array does not end")
                elif before:
                    if text[at] == "]" and before == ",":
                        break
                    if text[at] != before:
                        raise _bad_array(path, number, f"expected {before} or ]")
                    at, before = at + 1, ""
                elif text[at] == "]" and number == 0:
                    break
                else:
                    try:
                        row, end = _DECODER.raw_decode(text, at)
                    except (ValueError, RecursionError) as error:
                        text, at = text[at:], 0
                        more = stream.read(max(_HEAD_BYTES, len(text)))
                        if not more or len(text) > MOST_BYTES or not isinstance(error, json.JSONDecodeError):
                            raise _bad_array(path, number, str(error)) from error
                        text += more
                        continue
                    number += 1
                    yield f"{path} row {number}", row
                    at, before = end, ","
            rest = text[at + 1 :]
            while not rest.strip():
                if not (rest := stream.read(_HEAD_BYTES)):
                    return
            raise _bad_array(path, number, "something follows the array")
        except UnicodeDecodeError as error:
            raise _bad_array(path, number, "it is not UTF-8") from error


def _bad_array(path: Path, number: int, what: str) -> DataError:
    return DataError(
        f"{path} cannot be read after row {number} ({what}): an array of JSON objects is expected, each of "
        f"at most {MOST_BYTES >> 20} MiB: repair it there, and write the file in UTF-8"
    )


def _texts(extent: Extent, field: str) -> Iterator[bytes]:
    """The text that begins in the extent, cut where lines begin; in compressed files also by size."""
    _check_no_rows(extent.path, _head(extent.path), field)
    plain = _is_plain(extent.path)
    with _opened(extent) as (file, at):
        while text := file.read(max(0, extent.stop - at) if plain else SHARD_BYTES):
            if not text.endswith(b"\n"):
                text += _rest_of_line(file, extent.path)
            at += len(text)
            yield checked_text(extent.path, text)


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
    """Provide pyarrow for reading a file of this kind.

    Raises:
        DataError: pyarrow is not installed or raises an error.
    """
    pyarrow = _pyarrow(path)
    try:
        yield pyarrow
    except FileNotFoundError as error:
        raise unreadable(path, error) from error
    except (OSError, ValueError, OverflowError, MemoryError, pyarrow.ArrowException) as error:
        with suppress(OSError), path.open("rb") as file:
            if (head := file.read(len(LFS_POINTER))) == LFS_POINTER:
                check_kind(path, head)
        raise DataError(
            f"{path} is not {kind}, or damaged ({' '.join(str(error).split())}): copy it again, or leave it "
            "out"
        ) from error


def _row_groups(path: Path) -> list[int]:
    """The bytes of each row group before compression."""
    with _table(path, "parquet") as pyarrow, pyarrow.parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        columns = [group.column(number) for group in groups for number in range(group.num_columns)]
        starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        ends = (start + column.total_compressed_size for start, column in zip(starts, columns, strict=True))
        with path.open("rb") as raw, mmap(raw.fileno(), 0, access=ACCESS_READ) as content:
            # The last one of joined files counts, and its offsets lead into the first. Its footer repeats
            # some of the text.
            footer = len(content) - file.metadata.serialized_size
            if content.find(_PARQUET_SEAM, max(ends, default=0), footer) >= 0:
                raise _several(path, "parquet files")
        return [group.total_byte_size for group in groups]


def _parquet_rows(extent: Extent, data: DataSection) -> Iterator[tuple[str, Document]]:
    # Column chunks and pages are read piece by piece, because a row group may hold a whole data set.
    with (
        _table(extent.path, "parquet") as pyarrow,
        pyarrow.parquet.ParquetFile(extent.path, pre_buffer=False, buffer_size=_HEAD_BYTES) as file,
    ):
        columns = _columns(extent.path, file.schema_arrow, data)
        for group in range(extent.start, min(extent.stop, file.num_row_groups)):
            first = 1
            for batch in file.iter_batches(
                batch_size=_TABLE_ROWS, row_groups=[group], columns=columns, use_threads=False
            ):
                yield from _table_rows(batch, f"{extent.path} row group {group}", first, data)
                first += batch.num_rows


def _columns(path: Path, schema: Any, data: DataSection) -> list[str]:
    """The columns to read.

    Raises:
        DataError: no column can hold what is wanted.
    """
    names = [str(name) for name in schema.names]
    if {TOKEN_IDS, "labels"} <= {*names}:
        _say_tokens(path)
    if data.format == "chat" and not data.response_marker:
        if {*names}.isdisjoint((*MESSAGES, *ANSWERS)):
            refuse_preferences(names, str(path))
        pairs = PAIR_COLUMNS
        if {*MESSAGES} & {*names}:  # rows without messages may have a question and its answer
            pairs = pairs & {
                name
                for name, kind in zip(names, schema.types, strict=True)
                if _TEXT_TYPE.fullmatch(str(kind))
            }
        columns = [name for name in names if name in CHAT_COLUMNS | pairs and names.count(name) == 1]
        asked, answers = (not {*columns}.isdisjoint(several) for several in ((*QUESTIONS, *INPUTS), ANSWERS))
        if (asked and answers) or not {*columns}.isdisjoint(MESSAGES):
            return columns
        raise DataError(
            f'{path} holds no conversations: expected a column "messages" or "conversations", or '
            '"instruction" and "output", or "prompt" and "completion", got '
            f"{_names(names)}"
        )
    field = data.jsonl_field
    texts = [name for name, kind in zip(names, schema.types, strict=True) if _TEXT_TYPE.fullmatch(str(kind))]
    if names.count(field) == 1 and field in texts:
        return [field]
    if names.count(field) > 1:
        raise DataError(f"{path} has {names.count(field)} columns {field!r}: rename all but one of them")
    if field in names:
        actual = f"its column {field!r} holds {str(schema.types[names.index(field)])[:60]}, not text"
    else:
        actual = f"it has no column {field!r}"
    raise DataError(
        f"{path}: {actual}; "
        + (
            f"name the one that holds the text ({FIELD_KEYS}), of {_names(texts)}"
            if texts
            else f"no column holds text, only {_names(names)}: name other data"
        )
        + _advice(names)
    )


def _table_rows(batch: Any, where: str, first: int, data: DataSection) -> Iterator[tuple[str, Document]]:
    """The rows of a record batch. `first` is the number of its first row."""
    for number in range(batch.num_rows):
        place = f"{where} row {first + number}"
        row: Row = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.type.num_fields and column.slice(number, 1).nbytes > MOST_BYTES:
                raise DataError(
                    f"{place} has over {MOST_BYTES >> 20} MiB in column {name!r}: cut it into several"
                )
            try:
                value = _value(column, number)
                if value != value:  # NaN, as in JSON
                    value = None
                if data.format == "chat" and name in MEDIA:
                    row[name] = bool(value)
                    continue
                # Some writers do not declare text columns as text.
                row[name] = _decoded(value) if isinstance(value, bytes) else value
            except Exception as error:  # of a value that Python cannot hold, or no UTF-8
                raise DataError(
                    f"{place}: column {name!r} cannot be read ({error}): repair or remove that row"
                ) from error
        yield place, row


def _value(column: Any, number: int) -> Any:
    """A value of a column. Times within a list or an object that Python's cannot hold come as numbers."""
    try:
        value = column[number].as_py()
        kind = str(column.type)
        return _parsed(value, column.type) if _JSON_TYPE in kind or _MAP_TYPE in kind else value
    except (ArithmeticError, ValueError, LookupError):  # a date far away, or an unknown time zone
        if not column.type.num_fields:
            raise
        import pyarrow

        return column.slice(number, 1).cast(_with_numbers(pyarrow, column.type))[0].as_py()


def _parsed(value: Any, kind: Any) -> Any:
    """A value of this type of Arrow, with what its JSON stands for and maps as objects. Raises ValueError if
    that is no JSON."""
    if isinstance(value, str) and str(kind) == _JSON_TYPE:
        return json.loads(value)
    if isinstance(value, list) and str(kind).startswith(_MAP_TYPE):
        return {key: _parsed(item, kind.item_type) for key, item in value}
    if isinstance(value, dict):
        return {field.name: _parsed(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [_parsed(item, kind.field(0).type) for item in value]
    return value


def _with_numbers(pyarrow: Any, kind: Any) -> Any:
    """A type of Arrow with whole numbers in place of times."""
    if pyarrow.types.is_temporal(kind):
        return pyarrow.int64() if kind.bit_width == 64 else pyarrow.int32()
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_with_numbers(pyarrow, field.type)) for field in kind])
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_with_numbers(pyarrow, kind.value_type)))
    return kind


def _decoded(value: bytes) -> str:
    """The text in UTF-8 bytes. Raises ValueError if it is not text."""
    if SEPARATOR in value:
        raise ValueError("it holds zero bytes, as UTF-8 text does not")
    return value.decode()


def _arrow_batches(path: Path) -> Iterator[Any]:
    """The record batches of an Arrow file or stream. They are memory-mapped, so skipped batches are not
    read."""
    with _table(path, "an Arrow file") as pyarrow, pyarrow.memory_map(str(path)) as file:
        is_stream = False
        try:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:  # `datasets` writes streams, which can be appended to
            is_stream = True
            file.seek(0)
            batches = pyarrow.ipc.open_stream(file)
        for batch in batches:
            batch.validate()  # offsets beyond the data would end the process
            yield batch
        if is_stream:
            _check_stream_end(path, file)


def _check_stream_end(path: Path, file: Any) -> None:
    """Check that a stream, which is read, has its end, and that nothing follows it: pyarrow requires
    neither.

    Raises:
        DataError: the stream is cut off between two batches, or another one follows it.
    """
    stop = file.tell()
    if stop < file.size():
        raise _several(path, "streams")
    begin, end = file.read_at(4, 0), file.read_at(8, max(0, stop - 8))
    if begin == _STREAM_END[:4] and end != _STREAM_END:  # streams of before 2019 begin in another way
        raise DataError(f"{path} is cut off behind one of its batches: write it again, or copy it again")


def _several(path: Path, kind: str) -> DataError:
    return DataError(
        f"{path} holds several {kind}, one behind the other, and only one would be read: write each to a "
        "file of its own, and name the folder"
    )


def _arrow_rows(extent: Extent, data: DataSection) -> Iterator[tuple[str, Document]]:
    for number, batch in enumerate(islice(_arrow_batches(extent.path), extent.stop)):
        if number >= extent.start:
            rows = batch.select(_columns(extent.path, batch.schema, data))
            with _table(extent.path, "an Arrow file"):
                rows.validate(full=True)  # each row's offsets
            yield from _table_rows(rows, f"{extent.path} batch {number}", 1, data)
