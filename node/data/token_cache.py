"""Token ids on disk, so that a text is tokenized only once and need not be in memory.

    FOLDER/KEY.tokens     ids, little endian, in the tokenizer's dtype
           KEY.json       {"tokens": their number, "sha256": of the file}; written last
           KEY.partial    the tokens of an unfinished run
           KEY.progress   {"pieces": ..., "tokens": ...}: how much of KEY.partial is certainly on disk

KEY is the SHA-256 of the text and of the tokenizer's fingerprint. A process continues where a killed one
ended. FOLDER is $XDG_CACHE_HOME/thinwire/tokens, or ~/.cache/thinwire/tokens.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np

from node.data.text import SEPARATOR, write_whole
from node.data.tokenizer import Tokenizer, pieces_of
from wire.errors import DataError
from wire.identity.files import cache_folder as user_cache

BATCH_PIECES = 16
"""The pieces that are encoded at once, on all cores. After each batch the progress is on disk."""

Tell = Callable[[str], None]


def cache_folder() -> Path:
    """Where token files are kept. The folder is not created. Raises UserError for a user without a home
    directory."""
    return user_cache() / "tokens"


def tokens_of(text: bytes, tokenizer: Tokenizer, folder: Path, tell: Tell) -> np.ndarray:
    """The ids of the whole text, `[n]`, mapped from a file. The text is encoded first if no run has done so
    before.

    Args:
        tell: receives progress lines of a long encoding.

    Raises:
        DataError: the folder cannot be written, or the disk is full.
    """
    key = sha256(sha256(text).digest() + tokenizer.fingerprint.encode()).hexdigest()
    try:
        with sole_writer(folder, key):
            if (ids := _complete(folder, key, tokenizer)) is None:
                _encode(text, tokenizer, folder, key, tell)
                ids = _complete(folder, key, tokenizer)
    except OSError as error:
        raise DataError(
            f"tokens cannot be kept in {folder} ({error.strerror}): free some space or set XDG_CACHE_HOME to "
            "a folder that can be written"
        ) from error
    if ids is None:
        raise DataError(f"tokens in {folder} changed while they were written: check that disk")
    return ids


@contextmanager
def sole_writer(folder: Path, key: str) -> Iterator[None]:
    """Hold a lock: of two runs with the same text, one encodes and the other waits."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{key}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _complete(folder: Path, key: str, tokenizer: Tokenizer) -> np.ndarray | None:
    """The finished file, mapped; None if there is none, or if it was changed."""
    path = folder / f"{key}.tokens"
    record = _json(folder / f"{key}.json")
    dtype = tokenizer.dtype.newbyteorder("<")
    tokens = record.get("tokens")
    if not isinstance(tokens, int) or tokens < 1 or not path.is_file():
        return None
    if path.stat().st_size != tokens * dtype.itemsize:
        return None
    ids = np.memmap(path, dtype=dtype, mode="r", shape=(tokens,))
    if sha256(ids.data).hexdigest() != record.get("sha256"):
        return None
    return ids


def _encode(text: bytes, tokenizer: Tokenizer, folder: Path, key: str, tell: Tell) -> None:
    partial, progress = folder / f"{key}.partial", folder / f"{key}.progress"
    itemsize = tokenizer.dtype.itemsize
    record = _json(progress)
    pieces, tokens = record.get("pieces"), record.get("tokens")
    sure = (
        isinstance(pieces, int)
        and isinstance(tokens, int)
        and min(pieces, tokens) >= 0
        and partial.is_file()
        and partial.stat().st_size >= tokens * itemsize
    )
    done, count = (pieces, tokens) if sure else (0, 0)
    assert isinstance(done, int) and isinstance(count, int), "both were checked"
    begin = np.array(tokenizer.begin, dtype=tokenizer.dtype)
    read = 0
    waiting = iter(pieces_of(text))
    read += sum(map(len, islice(waiting, done)))
    with partial.open("r+b" if sure else "wb") as file:
        file.truncate(count * itemsize)
        file.seek(count * itemsize)
        for batch in _batches(waiting):
            encoded = tokenizer.encode(batch)
            arrays = [begin] if count == 0 else []
            for piece, ids in zip(batch, encoded, strict=True):
                arrays += [ids, begin] if piece == SEPARATOR else [ids]
            for ids in arrays:
                file.write(ids.astype(tokenizer.dtype.newbyteorder("<"), copy=False).tobytes())
                count += len(ids)
            file.flush()
            os.fsync(file.fileno())
            done += len(batch)
            read += sum(map(len, batch))
            replace_json(progress, {"pieces": done, "tokens": count})
            tell(f"tokenized {read / 1e6:.0f} of {len(text) / 1e6:.0f} MB: {count / 1e6:.1f} million tokens")
    with partial.open("rb") as whole:
        digest = sha256()
        while block := whole.read(1 << 22):
            digest.update(block)
    partial.replace(folder / f"{key}.tokens")
    replace_json(folder / f"{key}.json", {"tokens": count, "sha256": digest.hexdigest()})
    progress.unlink()


def _batches(pieces: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(pieces, BATCH_PIECES)):
        yield batch


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def replace_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON file atomically."""
    write_whole(path, json.dumps(values))
