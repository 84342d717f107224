"""Text into token ids: bytes as they are, or byte-pair encoding with the user's own tables.

`[data] tokenizer` is `bytes`, or names tables of byte-level BPE as GPT-2 has them: a folder that holds
`tokenizer.json`, `vocab.json` and `merges.txt`, or `encoder.json` and `vocab.bpe`; or one of these files. The
BPE itself is the `tokenizers` package, which only the coordinator needs.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from node.training.text import SEPARATOR, expanded, read_small
from wire.errors import DataError

if TYPE_CHECKING:
    import tokenizers

BYTES = "bytes"
MOST_TABLES_BYTES = 256 << 20
"""Of one file: the largest vocabularies have a tenth of it."""
PIECE_BYTES = 128 * 1024
"""Documents are encoded in pieces of about this size, each ending at a word's end."""
END_OF_TEXT = "<|endoftext|>"
"""Stands between documents, if the vocabulary has it."""

_BREAK = re.compile(rb"[ \n]")
_FAST = "tokenizer.json"
_TABLES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_EXTRA = 'pip install "thinwire[bpe]"'


class Tokenizer(ABC):
    """Token ids of a text. The same text gives the same ids, whatever was encoded before."""

    vocabulary: int
    """Ids lie below this."""
    fingerprint: str
    """Changes whenever the same text might give other ids."""
    ends: frozenset[int]
    """Each of these ids ends a text."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The narrowest for the vocabulary."""
        return np.min_scalar_type(self.vocabulary - 1)

    @abstractmethod
    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each piece of `pieces_of`, `[n]` of `dtype`."""

    @abstractmethod
    def prompt(self, text: str) -> list[int]:
        """Ids of a text to continue, as transformers encodes it: special tokens in it are special, and those
        that the tokenizer puts before a text come first."""

    @abstractmethod
    def decode(self, ids: np.ndarray) -> str:
        """The text of ids `[n]`, special tokens included."""


class ByteTokenizer(Tokenizer):
    """A token a byte."""

    vocabulary = 256
    fingerprint = BYTES
    ends = frozenset(SEPARATOR)

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]

    def prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: np.ndarray) -> str:
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding. Text that looks like a special token is encoded as the text that it is."""

    def __init__(
        self,
        bpe: "tokenizers.Tokenizer",
        tables: Sequence[bytes],
        where: str,
        end_of_text: str = "",
        ends: Sequence[int] = (),
    ) -> None:
        """`end_of_text` stands between documents if the vocabulary lacks `END_OF_TEXT`. `ends` are more ids
        that end a text."""
        import tokenizers

        self._bpe = bpe
        self._bpe.encode_special_tokens = True
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self.vocabulary = 1 + max(bpe.get_vocab().values(), default=0)
        named = (bpe.token_to_id(name) for name in (END_OF_TEXT, end_of_text) if name)
        known = [found for found in named if found is not None]
        # Tables without an end of text may still know the zero byte.
        between = known[:1] or bpe.encode("\0", add_special_tokens=False).ids
        if not between:
            raise DataError(
                f"the tokenizer in {where} has neither {END_OF_TEXT} nor an eos_token in "
                "tokenizer_config.json to put between documents: add one"
            )
        self._between = np.array(between, dtype=self.dtype)
        parts = [BPE_FORMAT.encode(), tokenizers.__version__.encode(), repr(between).encode(), *tables]
        self.fingerprint = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
        self.ends = frozenset([*known, *ends, *(between if len(between) == 1 else ())])

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        texts = [piece for piece in pieces if piece != SEPARATOR]
        encoded = iter(
            self._bpe.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        )
        return [
            self._between if piece == SEPARATOR else np.array(next(encoded).ids, dtype=self.dtype)
            for piece in pieces
        ]

    def prompt(self, text: str) -> list[int]:
        self._bpe.encode_special_tokens = False
        try:
            return list(self._bpe.encode(text, add_special_tokens=True).ids)
        finally:
            self._bpe.encode_special_tokens = True

    def to_json(self) -> str:
        """As a `tokenizer.json`."""
        return str(self._bpe.to_str(pretty=True))

    @property
    def end_of_text(self) -> str:
        """`END_OF_TEXT` if the vocabulary has it, else empty."""
        return END_OF_TEXT if self._bpe.token_to_id(END_OF_TEXT) is not None else ""

    def decode(self, ids: np.ndarray) -> str:
        return str(self._bpe.decode(ids.tolist(), skip_special_tokens=False))


BPE_FORMAT = "1"
"""Raised when pieces are cut in another way."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `[data] tokenizer` names.

    Raises:
        DataError: no such tables, damaged ones, or the package that reads them is not installed.
        ConfigError: a home directory of an unknown user.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = expanded(name, "data.tokenizer")
    try:
        if not path.exists():
            raise DataError(
                f"no tokenizer {name!r}: set [data] tokenizer to {BYTES}, or to a folder or file with GPT-2 "
                "style tables (tokenizer.json, vocab.json and merges.txt, or encoder.json and vocab.bpe)"
            )
        found = _find(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"[data] tokenizer {name} needs the tokenizers package on the coordinator's machine: {_EXTRA}"
        ) from error
    tables = [_read(file) for file in found]
    try:
        if len(found) == 1:
            bpe = tokenizers.Tokenizer.from_str(tables[0].decode())
        else:
            bpe = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(found[0]), str(found[1])))
            bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            bpe.decoder = tokenizers.decoders.ByteLevel()
        folder = found[0].parent
        end_of_text = special_tokens(folder).get("eos_token", "")
        made = BpeTokenizer(bpe, tables, str(path), end_of_text, _generation_ends(folder))
    except DataError:
        raise
    except Exception as error:  # what is wrong with tables comes as bare Exception from the package
        raise DataError(f"the tokenizer in {path} cannot be read ({error}); copy its files again") from error
    _check_bytes(made, path)
    return made


def of_tables(name: str) -> BpeTokenizer | None:
    """The tokenizer if `name` names tables in two files on this machine; None for a `tokenizer.json`.

    Raises as `load_tokenizer`.
    """
    path = expanded(name, "data.tokenizer")
    if not path.exists() or len(_find(path)) == 1:
        return None
    made = load_tokenizer(name)
    return made if isinstance(made, BpeTokenizer) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like of a tokenizer's folder; empty without a tokenizer_config.json.

    Raises DataError if that cannot be read.
    """
    found = {}
    for name, value in _json_object(folder / "tokenizer_config.json").items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _generation_ends(folder: Path) -> list[int]:
    """The ids at which transformers ends a text of the model in `folder`. Raises DataError."""
    found = _json_object(folder / "generation_config.json").get("eos_token_id")
    return [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, int)]


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty without the file. Raises DataError if it cannot be read."""
    try:
        raw = json.loads(read_small(path, MOST_TABLES_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); copy it again") from error
    return raw if isinstance(raw, dict) else {}


def pieces_of(text: bytes) -> Iterator[bytes]:
    """Documents of `read_text`, cut, and `SEPARATOR` between documents.

    Where a piece ends depends on the text alone: behind at least `PIECE_BYTES`, before a space or a line's
    end that stands between two characters which are no white space. GPT-2's rules break there anyway, so the
    tokens are those of the whole document; with other rules a token begins there all the same.
    """
    start = 0
    while True:
        end = text.find(SEPARATOR, start)
        stop = len(text) if end < 0 else end
        while start < stop:
            cut = _cut(text, start + PIECE_BYTES, stop)
            yield text[start:cut]
            start = cut
        if end < 0:
            return
        yield SEPARATOR
        start = end + 1


def _cut(text: bytes, start: int, stop: int) -> int:
    for found in _BREAK.finditer(text, start, stop):
        position = found.start()
        # Four bytes hold any character.
        before = text[max(0, position - 4) : position].decode(errors="ignore")[-1:]
        after = text[position + 1 : min(stop, position + 5)].decode(errors="ignore")[:1]
        if before and after and not before.isspace() and not after.isspace():
            return position
    return stop


def _find(path: Path) -> list[Path]:
    """The one or two files of a tokenizer."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        choices: list[tuple[str, ...]] = [(_FAST,), *_TABLES]
    else:
        choices = [pair for pair in _TABLES if path.name in pair] or [(path.name,)]
    for names in choices:
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            return files
    expected = " or ".join(" and ".join(names) for names in choices)
    raise DataError(f"no tokenizer in {folder}: expected {expected}")


def _read(path: Path) -> bytes:
    try:
        return read_small(path, MOST_TABLES_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _check_bytes(tokenizer: BpeTokenizer, path: Path) -> None:
    """Tables that do not know every byte drop text without a word."""
    text = "".join(map(chr, [*range(1, 256), 0x4E2D, 0x1F600]))
    (ids,) = tokenizer.encode([text.encode()])
    # Decoders of SentencePiece's kind drop the space that they put before a text.
    if tokenizer.decode(ids).strip() != text.strip():
        raise DataError(
            f"the tokenizer in {path} does not give back every text that it encodes: byte-level BPE tables, "
            "as GPT-2 has them, are needed"
        )
