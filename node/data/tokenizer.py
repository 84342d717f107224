"""Converts text into token ids: bytes, or byte-pair encoding with the user's own tables.

`[data] tokenizer` is `bytes`, or names tables of a byte-level BPE like GPT-2's. It names one of these files
or a folder with them: `tokenizer.json`; `vocab.json` and `merges.txt`; `encoder.json` and `vocab.bpe`; or
SentencePiece's `tokenizer.model`. The `tokenizers` package computes the BPE; only the coordinator needs it.
"""

import base64
import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from node.data.sentencepiece import SPACE, sentencepiece_tokenizer
from node.data.text import SEPARATOR, expanded, read_small
from node.model.families.known import FAMILIES
from wire.errors import DataError

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)

BYTES = "bytes"
PIECE_BYTES = 128 * 1024
"""The approximate size of the pieces in which documents are encoded. Each ends at the end of a word."""
MOST_WORD_BYTES = 4 << 20
"""A piece without a word's end stops at this size, because merging takes a hundred times its memory."""
END_OF_TEXT = "<|endoftext|>"
"""Separates documents, if the vocabulary has it."""

MOST_TABLES_BYTES = 128 << 20
"""The most bytes of one file. The largest published ones have a third of it."""
MOST_ENDS = 1000
"""The most tokens that may end a text."""
MOST_GROWTH = 1000
"""The most characters that a tokenizer's rules may make of one."""

MOST_SEARCHED = 16 << 20
"""The most characters of text that are searched for special tokens."""

_BREAK = re.compile(rb"[ \n]")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* 0\r?\n")
"""The beginning of a table of tiktoken: a token in base64 and its id."""
_FAST = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_ADDED = "added_tokens.json"
_CONFIG = "config.json"
_MORE = "extra_special_tokens"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The order in which transformers adds them, others behind."""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
SENTENCEPIECE = "tokenizer.model"
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text where no `tokenizer.json` says it."""
_MISTRAL_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Mistral's tokenizers of bytes cut text. Many a `tokenizer.json` of theirs says it otherwise."""
_MISTRAL_LEAST = 100_000
"""Those have more tokens than this; Mistral's older ones, of SentencePiece, have fewer."""
LLAMA_CLASSES = tuple(f"{name}Tokenizer{fast}" for name in ("Llama", "CodeLlama") for fast in ("", "Fast"))
"""Values of `tokenizer_class` with which transformers 5 cuts text by rules of the class, not of the file."""
_AS_WRITTEN = ("mistral", "mixtral", "olmo2")
"""Types of models for which it takes what is in the files all the same."""
_NAMED_BY_CLASS = {
    "GPT2Tokenizer": {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT},
    "GPTNeoXTokenizer": {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT},
    "Qwen2Tokenizer": {"eos_token": END_OF_TEXT},
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>"},
}
"""The tokens of classes where no file names any."""
_TABLES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_EXTRA = 'pip install "thinwire[bpe]"'


class Tokenizer(ABC):
    """Token ids of a text. The same text gives the same ids, whatever was encoded before."""

    vocabulary: int
    """All ids are below this."""
    fingerprint: str
    """It changes whenever the same text might give other ids."""
    begin: tuple[int, ...] = ()
    """The ids at the beginning of each text."""
    ends: frozenset[int]
    """The ids that each end a text."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The narrowest unsigned dtype for the vocabulary."""
        return np.min_scalar_type(self.vocabulary - 1)

    @abstractmethod
    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each piece of `pieces_of`, `[n]` of `dtype`."""

    @abstractmethod
    def prompt(self, text: str) -> list[int]:
        """The ids of a text to continue. Special tokens in it are special, and `begin` is added unless the
        text starts with it."""

    @abstractmethod
    def decode(self, ids: np.ndarray) -> str:
        """The text of ids `[n]`, including special tokens."""


class ByteTokenizer(Tokenizer):
    """One token per byte."""

    vocabulary = 256
    fingerprint = BYTES
    ends = frozenset(SEPARATOR)

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]

    def prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: np.ndarray) -> str:
        # A model's vocabulary may have more ids than there are bytes. They have no text.
        return ids[ids < self.vocabulary].astype(np.uint8).tobytes().decode(errors="replace")


class SpecialTokens:
    """Finds the characters of a tokenizer's special tokens in text."""

    def __init__(self, bpe: "tokenizers.Tokenizer") -> None:
        added = bpe.get_added_tokens_decoder().values()
        special = [re.escape(token.content) for token in added if token.special and token.content]
        self._pattern = re.compile("|".join(special)) if special else None
        self._searched = 0

    def found_in(self, texts: Iterable[str]) -> str:
        """The first special token, once; otherwise empty, also after `MOST_SEARCHED` characters."""
        for text in texts:
            if self._pattern is None or self._searched > MOST_SEARCHED:
                break
            self._searched += len(text)
            if match := self._pattern.search(text):
                self._pattern = None
                return match[0][:50]
        return ""


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding. Text that looks like a special token is encoded as ordinary text."""

    def __init__(self, bpe: "tokenizers.Tokenizer", tables: Sequence[bytes], folder: Path) -> None:
        """
        Args:
            folder: its settings say which tokens begin and end a text.

        Raises:
            DataError: these tokens are missing or not in the vocabulary.
        """
        import tokenizers

        self._bpe = bpe
        self._folder = folder
        self._bpe.encode_special_tokens = True
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self._special = SpecialTokens(bpe)
        self.vocabulary = 1 + max(bpe.get_vocab().values(), default=0)
        self.begin, behind = _around(bpe)
        if (largest := max(*self.begin, *behind, 0, 0)) >= self.vocabulary:
            raise DataError(
                f"the tokenizer in {folder} puts token {largest} around texts, and has tokens below "
                f"{self.vocabulary}; copy its files again"
            )
        default = bpe.token_to_id(END_OF_TEXT)
        known = _known_ends(bpe, folder)
        template = _template_text(folder)
        # A chat tokenizer's end of text may be the token that ends a turn.
        apart = [end for end in known if (bpe.id_to_token(end) or "") not in template]
        ends = [*behind[-1:], *apart, *([] if default is None else [default]), *known]
        # Tables without an end of text may still know the zero byte.
        between = list(behind) or ends[:1] or bpe.encode("\0", add_special_tokens=False).ids
        if not between:
            raise DataError(
                f"the tokenizer in {folder} has no end of text to put between documents: name one of its "
                "tokens as eos_token in tokenizer_config.json"
            )
        if not ends:
            _say_no_end(str(folder))
        self._between = np.array(between, dtype=self.dtype)
        self.ends = frozenset([*ends, *(between if len(between) == 1 else ())])
        parts = [BPE_FORMAT.encode(), tokenizers.__version__.encode(), *tables]
        if self.begin or between != [default]:
            parts.append(repr((self.begin, between)).encode())
        self.fingerprint = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        texts = [piece.decode() for piece in pieces if piece != SEPARATOR]
        if token := self._special.found_in(texts):
            logger.warning(
                "the text has %s, a special token of %s: in text it counts as ordinary characters. Write "
                'documents as rows of JSONL, and set data.format to "chat" for conversations',
                token,
                self._folder,
            )
        with one_line(self._folder, "cannot encode this text"):
            encoded = iter(self._bpe.encode_batch_fast(texts, add_special_tokens=False))
        return [
            self._between if piece == SEPARATOR else np.array(next(encoded).ids, dtype=self.dtype)
            for piece in pieces
        ]

    def prompt(self, text: str) -> list[int]:
        self._bpe.encode_special_tokens = False
        try:
            with one_line(self._folder, "cannot encode this text"):
                ids = tuple(self._bpe.encode(text, add_special_tokens=False).ids)
            return list(ids if self.begin and ids[: len(self.begin)] == self.begin else self.begin + ids)
        finally:
            self._bpe.encode_special_tokens = True

    def to_json(self) -> str:
        return str(self._bpe.to_str(pretty=True))

    def normalized(self, text: str) -> str:
        """The text as the tables change it before they cut it, such as to small letters."""
        rules = self._bpe.normalizer
        return text if rules is None else str(rules.normalize_str(text)).replace(SPACE, " ")

    @property
    def end_of_text(self) -> str:
        """`END_OF_TEXT` if the vocabulary has it, else empty."""
        return END_OF_TEXT if self._bpe.token_to_id(END_OF_TEXT) is not None else ""

    def decode(self, ids: np.ndarray) -> str:
        with one_line(self._folder, "cannot decode these tokens"):
            return str(self._bpe.decode(ids.tolist(), skip_special_tokens=False))


BPE_FORMAT = "1"
"""Increase this when pieces are cut in another way."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `[data] tokenizer` names.

    Raises:
        DataError: the tables are missing or damaged, or the package that reads them is not installed.
        ConfigError: the path names the home directory of an unknown user.
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
        files = tokenizer_files(path)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error
    bpe, parts = parsed_tokenizer(files)
    with one_line(path):
        tokenizer = BpeTokenizer(bpe, parts, files[0].parent)
        _check_bytes(tokenizer, path)
    return tokenizer


def parsed_tokenizer(files: Sequence[Path]) -> tuple["tokenizers.Tokenizer", list[bytes]]:
    """A tokenizer of the files of `tokenizer_files` and of the settings beside them, as transformers has it,
    and what it was made of. Raises DataError."""
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"[data] tokenizer {files[0]} needs the tokenizers package on the coordinator's machine: {_EXTRA}"
        ) from error
    folder = files[0].parent
    tables = [read_bounded(file) for file in files]
    with one_line(files[0]):
        if files[0].suffix == ".model":
            if _TIKTOKEN.match(tables[0]):
                raise DataError(
                    f"{files[0]} is a table of tiktoken, not of SentencePiece: use the folder of the "
                    f"model that has {_FAST}"
                )
            bpe, rules = _of_pieces(tables[0], folder)
            tables += rules
        elif len(files) == 1:
            bpe = tokenizers.Tokenizer.from_str(tables[0].decode())
            for rules in filter(None, (bpe.normalizer, bpe.decoder)):
                if (growth := _growth(json.loads(rules.__getstate__()))) > MOST_GROWTH:
                    raise DataError(f"{files[0]} makes {growth:.3g} characters of one: copy it again")
            if getattr(bpe.model, "dropout", None):
                bpe.model.dropout = None  # with dropout the same text gives other ids each time
            if (around := bpe.num_special_tokens_to_add(is_pair=False)) > MOST_GROWTH:
                raise DataError(f"{files[0]} puts {around:,} tokens around a text: copy it again")
            for token in json.loads(tables[0]).get("added_tokens") or ():
                if (index := bpe.token_to_id(token["content"])) != token["id"]:
                    _say_other_id(str(folder), token["content"][:50], index, token["id"])
            tables += _mended(bpe, folder)
            _report_class(bpe, folder)
        else:
            bpe = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(files[0]), str(files[1])))
            bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            bpe.decoder = tokenizers.decoders.ByteLevel()
            if _is_of_qwen(folder):
                bpe.pre_tokenizer = _words(_QWEN_WORDS)
                bpe.normalizer = tokenizers.normalizers.NFC()
                tables.append(_QWEN_WORDS.encode())
        changed = _add_tokens(bpe, folder, flags=files[0].suffix != ".model")
        if len(files) > 1 or files[0].suffix == ".model":
            _set_begin(bpe, folder)
    return bpe, [*tables, *(token.encode() for token in changed)]


def _of_pieces(data: bytes, folder: Path) -> tuple["tokenizers.Tokenizer", list[bytes]]:
    """The tokenizer of a `tokenizer.model`, and the rules of the settings beside it that change ids. Raises
    DataError."""
    named = set(map(_content, _special_values(folder)))
    added = {
        index: _added_token(value, special=_content(value) in named, normalized=False)
        for index, value in _placed_tokens(folder).items()
    }
    legacy = json_object(folder / _SETTINGS).get("legacy") is not False
    bpe = sentencepiece_tokenizer(data, added, legacy=legacy)
    pieces = bpe.get_vocab_size(with_added_tokens=False)
    beyond = (token for index, token in added.items() if index >= pieces)
    unusual = [token for token in beyond if not token.special or token.lstrip or token.rstrip]
    return bpe, [*map(str.encode, map(repr, unusual)), *([] if legacy else [b"not legacy"])]


def _is_of_qwen(folder: Path) -> bool:
    """Whether `vocab.json` and `merges.txt` have the rules of Qwen's tokenizers, not GPT-2's. Raises
    DataError."""
    kinds = (
        json_object(folder / _SETTINGS).get("tokenizer_class"),
        json_object(folder / _CONFIG).get("model_type"),
    )
    return any(str(kind).lower().startswith("qwen") for kind in kinds)


def _words(pattern: str) -> "tokenizers.pre_tokenizers.PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])


def _mended(bpe: "tokenizers.Tokenizer", folder: Path) -> list[bytes]:
    """Let a tokenizer of Mistral cut text as its vocabulary was made, if `fix_mistral_regex` says so.

    Returns:
        What changed the ids.

    Raises:
        DataError: settings beside it cannot be read.
    """
    config = json_object(folder / _CONFIG)
    # Transformers heeds the setting only beside what its older versions wrote.
    is_old = re.match(r"[0-4]\.", str(config.get("transformers_version") or "4."))
    is_mistral = config.get("model_type") == "mistral" and bpe.get_vocab_size() > _MISTRAL_LEAST
    if not (is_old and is_mistral and bpe.pre_tokenizer):
        return []
    given = bpe.pre_tokenizer.__getstate__()
    fixes = json_object(folder / _SETTINGS).get("fix_mistral_regex")
    if fixes is True:
        bpe.pre_tokenizer = _words(_MISTRAL_WORDS)
        return [] if bpe.pre_tokenizer.__getstate__() == given else [_MISTRAL_WORDS.encode()]
    # The vocabulary has no number of two digits, which this pattern keeps together.
    if fixes is None and b"{1,3}" in given and bpe.token_to_id("10") is None:
        _say_other_words(str(folder))
    return []


def _report_class(bpe: "tokenizers.Tokenizer", folder: Path) -> None:
    """Warn of tables for which transformers has other rules than theirs. Raises DataError if settings beside
    them cannot be read."""
    settings, config = json_object(folder / _SETTINGS), json_object(folder / _CONFIG)
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if kind not in LLAMA_CLASSES or config.get("model_type") in _AS_WRITTEN or bpe.normalizer is None:
        return
    if b'"Prepend"' in bpe.normalizer.__getstate__():
        _say_other_class(str(folder), kind)


def _growth(rules: Mapping[str, Any]) -> float:
    """The most characters that a normalizer or a decoder can make of one. It may replace a character by text,
    or put text before it."""
    parts = rules.get("normalizers") or rules.get("decoders") or ()
    own = max(len(rules.get("content") or ""), 1 + len(rules.get("prepend") or ""))
    if charsmap := base64.b64decode(rules.get("precompiled_charsmap") or ""):
        # SentencePiece's format: the size of a search tree, the tree, and the texts to which it leads.
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
        own = max(own, *map(len, texts.split(b"\0")))
    return own * math.prod(map(_growth, parts), start=1.0)


@contextmanager
def one_line(path: Path, what: str = "cannot be read") -> Iterator[None]:
    """Turn errors of the package into a DataError of one line.

    It raises bare Exception, or a panic of its Rust code, for instance for a pattern that backtracks too
    often.
    """
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"the tokenizer in {path} {what} ({reason}); copy its files again, or name its folder"
        ) from error


def of_tables(name: str) -> BpeTokenizer | None:
    """The tokenizer if `name` names tables of another kind on this machine; None for a `tokenizer.json`.

    Raises as `load_tokenizer`.
    """
    path = expanded(name, "data.tokenizer")
    if not path.exists():
        return None
    files = tokenizer_files(path)
    if len(files) == 1 and files[0].suffix != ".model":
        return None
    tokenizer = load_tokenizer(name)
    return tokenizer if isinstance(tokenizer, BpeTokenizer) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like of a tokenizer's folder, as transformers has them: those of
    `special_tokens_map.json` count more, unless `tokenizer_config.json` lists the added tokens.

    Raises:
        DataError: a file cannot be read.
    """
    return {name: content for name, value in _named_tokens(folder).items() if (content := _content(value))}


def _named_tokens(folder: Path) -> dict[str, Any]:
    files = [json_object(folder / file) for file in (_SETTINGS, _SPECIAL)]
    if "added_tokens_decoder" in files[0]:
        files.reverse()
    named: dict[str, Any] = dict(_tokens_of_class(folder))
    named |= {name: value for values in files for name, value in values.items() if name.endswith("_token")}
    for values in files:
        for key in (_MORE, "model_specific_special_tokens"):
            # Names of the model's own, such as image_token.
            named |= more if isinstance(more := values.get(key), dict) else {}
    return {name: value for name, value in named.items() if _content(value)}


def _tokens_of_class(folder: Path) -> dict[str, str]:
    """The names that a tokenizer has by its class alone."""
    kind, name = str(json_object(folder / _CONFIG).get("model_type")), None
    if kind not in _AS_WRITTEN:
        by_type = (family.tokenizers[kind] for family in FAMILIES.values() if kind in family.tokenizers)
        name = json_object(folder / _SETTINGS).get("tokenizer_class") or next(by_type, None)
    return _NAMED_BY_CLASS.get(str(name).removesuffix("Fast"), {})


def _content(value: Any) -> str:
    """The text of a token in a settings file, or empty."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _placed_tokens(folder: Path) -> dict[int, Any]:
    """Tokens that the settings add, by the ids that they give them. Raises DataError."""
    decoder = json_object(folder / _SETTINGS).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        tokens = ((int(index), value) for index, value in decoder.items() if index.isdecimal())
    else:
        tokens = ((index, token) for token, index in json_object(folder / _ADDED).items())
    return {index: value for index, value in tokens if type(index) is int and _content(value)}


def _add_tokens(bpe: "tokenizers.Tokenizer", folder: Path, *, flags: bool) -> list[str]:
    """Add the tokens that only the settings have, as transformers does: behind those of the tables, in the
    order of the ids that they are given, and then those that have a name.

    Args:
        flags: let a list of ids change what the tables say of a token, such as that it takes white space.

    Returns what was added or changed. Raises DataError.
    """
    placed = _placed_tokens(folder)
    special = _special_values(folder)
    known = {token.content: repr(token) for token in bpe.get_added_tokens_decoder().values()}
    named = set(map(_content, special))
    changed = []
    for index, value in [*sorted(placed.items()), *((None, value) for value in special)]:
        token = _added_token(value, special=index is None or _content(value) in named)
        listed = flags and index is not None and isinstance(value, dict)
        there = known.get(token.content)
        if not token.content or (there is not None and (not listed or there == repr(token))):
            continue
        bpe.add_tokens([token])
        known[token.content] = repr(token)
        changed.append(repr(token))
        if index is not None and bpe.token_to_id(token.content) != index:
            _say_other_id(str(folder), token.content[:50], bpe.token_to_id(token.content), index)
    return changed


def _special_values(folder: Path) -> list[Any]:
    """The special tokens of the settings, those with a name first. Raises DataError."""
    names = _named_tokens(folder)
    special = [names[name] for name in sorted(names, key=lambda name: (*_NAMED, name).index(name))]
    for file in (_SETTINGS, _SPECIAL):
        settings = json_object(folder / file)
        extra = settings.get(_MORE)
        listed = extra if isinstance(extra, list) and extra else settings.get("additional_special_tokens")
        special += listed if isinstance(listed, list) else ()
        if listed is extra and file == _SETTINGS:
            break
    return special


def _added_token(value: Any, *, special: bool, **fixed: bool) -> "tokenizers.AddedToken":
    """The token of a settings file, with its flags except for those that are `fixed`."""
    import tokenizers

    fields = value if isinstance(value, dict) else {}
    flags = {name: fields[name] for name in _FLAGS if isinstance(fields.get(name), bool)}
    flags |= {"special": True} if special else {}
    return tokenizers.AddedToken(_content(value), **{**flags, **fixed})


def _set_begin(bpe: "tokenizers.Tokenizer", folder: Path) -> None:
    """Let texts begin as `add_bos_token` says, which a `tokenizer.json` says itself. Raises DataError."""
    from tokenizers import processors

    adds = json_object(folder / _SETTINGS).get("add_bos_token")
    if isinstance(adds, bool):
        begin = special_tokens(folder).get("bos_token", "")
        token = bpe.token_to_id(begin)
        before = [(begin, token)] if adds and token is not None else []
        bpe.post_processor = processors.TemplateProcessing(
            single=[*(begin for begin, _ in before), "$A"], special_tokens=before
        )


def _around(bpe: "tokenizers.Tokenizer") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tables put before and behind a text."""
    plain, whole = (bpe.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    start = next(starts, None)
    return ((), ()) if start is None else (tuple(whole[:start]), tuple(whole[start + len(plain) :]))


def begin_text(bpe: "tokenizers.Tokenizer") -> str:
    """The tokens that the tables put before a text, as text."""
    return "".join(bpe.id_to_token(token) or "" for token in _around(bpe)[0])


def _known_ends(bpe: "tokenizers.Tokenizer", folder: Path) -> list[int]:
    """The ids that end a text, from the tokenizer's and the model's files in `folder`. Raises DataError."""
    named = bpe.token_to_id(special_tokens(folder).get("eos_token", ""))
    ends: list[Any] = [] if named is None else [named]
    rows = 1 << 32
    for file in (_CONFIG, "generation_config.json"):
        values = json_object(folder / file)
        inner = values.get("text_config")
        for level in (values, inner if isinstance(inner, dict) else {}):
            if type(size := level.get("vocab_size")) is int:
                rows = min(rows, size)
            ids = level.get("eos_token_id")
            ends += ids[:MOST_ENDS] if isinstance(ids, list) else [] if ids is None else [ids]
    known = []
    for end in ends:
        if type(end) is int and 0 <= end < rows and bpe.id_to_token(end) is not None:
            known.append(end)
        else:
            _say_unknown_end(str(folder), repr(end)[:50])
    return list(dict.fromkeys(known))


def _template_text(folder: Path) -> str:
    """The chat template of a folder; empty if it has none. Raises DataError."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_bounded(path).decode(errors="replace")
    return json.dumps(json_object(folder / _SETTINGS).get("chat_template", ""), ensure_ascii=False)


@cache
def _say_no_end(folder: str) -> None:
    logger.warning(
        "the tokenizer in %s names no end of text: a zero byte stands between documents; eos_token in "
        "tokenizer_config.json would name one",
        folder,
    )


@cache
def _say_other_id(folder: str, token: str, index: int, given: int) -> None:
    logger.warning(
        "the tokenizer in %s gives %s the id %d, as in transformers, where its files say %d: ids follow the "
        "order of the tokens, without gaps",
        folder,
        token,
        index,
        given,
    )


@cache
def _say_other_class(folder: str, kind: str) -> None:
    logger.warning(
        "the tokenizer.json in %s puts a space behind each special token, as the model learned it; "
        "transformers 5 does not with tokenizer_class %s: set it to PreTrainedTokenizerFast there, as an "
        "export does, to have these ids everywhere",
        folder,
        kind,
    )


@cache
def _say_normalized(path: str) -> None:
    logger.warning(
        "the tokenizer in %s changes characters before it cuts text, as its normalizer says: the model sees "
        "and writes the changed text, such as small letters or plain forms of characters",
        path,
    )


@cache
def _say_other_words(folder: str) -> None:
    logger.warning(
        "the tokenizer.json in %s cuts words otherwise than Mistral's models learned: set fix_mistral_regex "
        "to true in tokenizer_config.json, as transformers advises, or to false to keep it so",
        folder,
    )


@cache
def _say_unknown_end(folder: str, end: str) -> None:
    logger.warning(
        "the files in %s name %s as an eos_token_id, which is no token of theirs: it is ignored; correct it "
        "in config.json and generation_config.json",
        folder,
        end,
    )


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file. Raises DataError if it cannot be read, or holds
    another value."""
    if not path.exists():
        return {}
    try:
        raw = json.loads(read_bounded(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); copy it again") from error
    if not isinstance(raw, dict):
        raise DataError(f"{path} holds no JSON object, as is expected there; copy it again")
    return raw


def read_bounded(path: Path) -> bytes:
    """The contents of a tokenizer's file. Raises DataError if it is missing, no regular file or too large."""
    try:
        return read_small(path, MOST_TABLES_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"no file {path}: name one that is there") from error
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error


def pieces_of(text: bytes) -> Iterator[bytes]:
    """The documents of `read_text` in pieces, with `SEPARATOR` between documents.

    The end of a piece depends only on the text: it is the first space or line end after `PIECE_BYTES` that
    lies between two characters other than white space. GPT-2's rules break there too, so the tokens are those
    of the whole document. With other rules a token begins there all the same. A very long word is cut in the
    middle.
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
    most = min(stop, start + MOST_WORD_BYTES)
    for match in _BREAK.finditer(text, start, most):
        position = match.start()
        # Four bytes are enough for any character.
        before = text[max(0, position - 4) : position].decode(errors="ignore")[-1:]
        after = text[position + 1 : min(stop, position + 5)].decode(errors="ignore")[:1]
        if before and after and not before.isspace() and not after.isspace():
            return position
    while most < stop and text[most] & 0xC0 == 0x80:
        most -= 1  # back to the first byte of a character
    return most


def tokenizer_files(path: Path) -> list[Path]:
    """The one or two files of a tokenizer. Raises DataError."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        choices: list[tuple[str, ...]] = [(_FAST,), *_TABLES, (SENTENCEPIECE,)]
    else:
        choices = [pair for pair in _TABLES if path.name in pair] or [(path.name,)]
    for names in choices:
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            return files
    expected = " or ".join(" and ".join(names) for names in choices)
    raise DataError(f"no tokenizer in {folder}: expected {expected}")


def _check_bytes(tokenizer: BpeTokenizer, path: Path) -> None:
    """Refuse tables that do not have every byte, because they would drop text silently. Warn of those that
    change characters by rules of their own.

    Raises:
        DataError: a byte is missing.
    """
    # One character for each first byte that UTF-8 has. Their other bytes are among those of the first
    # characters.
    two = [lead << 6 | 0x1F for lead in range(4, 32)]
    three = [0xD005 if lead == 13 else lead << 12 | 0xC05 for lead in range(16)]
    four = [0x1F600, *(lead << 18 | 0x1C005 for lead in range(1, 4)), 0x10C005]
    text = "".join(map(chr, [*range(1, 256), *two, *three, *four]))
    (ids,) = tokenizer.encode([text.encode()])
    # SentencePiece's decoders drop the space that they put before a text.
    decoded = tokenizer.decode(ids).strip()
    if decoded == text.strip():
        return
    if decoded == tokenizer.normalized(text).strip():
        _say_normalized(str(path))
    else:
        raise DataError(
            f"the tokenizer in {path} does not give back every text that it encodes: byte-level BPE tables, "
            "as GPT-2 has them, are needed"
        )
