"""Reads SentencePiece's `tokenizer.model`, for models without a `tokenizer.json`.

The file is a protobuf. Only the pieces, with their scores and kinds, and a few settings are needed. Settings
that change text before it is cut (a character table, dropped white space) are refused.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wire.errors import DataError

if TYPE_CHECKING:
    import tokenizers

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a space."""
NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4
UNIGRAM, BPE = 1, 2
_ADVICE = "save it as tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"


def sentencepiece_tokenizer(
    data: bytes, added: "Mapping[int, tokenizers.AddedToken]", *, legacy: bool = True
) -> "tokenizers.Tokenizer":
    """A tokenizer with the pieces of a `tokenizer.model`, and with tokens that were added after them.

    Args:
        added: the added tokens by id.
        legacy: put the space that a text begins with behind special tokens, too.

    Raises:
        DataError: the tokenizer has features that are not supported.
        ValueError: the file is damaged.
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    rules: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == 1:
            entry = dict(_fields(value))
            score = struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0
            pieces.append((entry[1].decode(), score, entry.get(3, NORMAL)))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            rules = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    prefixed, squeezed = rules.get(3, 1), rules.get(4, 1)
    if rules.get(2) or squeezed or trainer.get(3, UNIGRAM) not in (UNIGRAM, BPE):
        raise DataError(f"a tokenizer.model that changes its text, or has an unknown kind: {_ADVICE}")

    unknown = next((index for index, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN), None)
    name = None if unknown is None else pieces[unknown][0]
    fallback = bool(trainer.get(35, 0))
    model: Any
    if trainer.get(3, UNIGRAM) == BPE:
        vocabulary = {piece: index for index, (piece, _, _) in enumerate(pieces)}
        merges = _merges(vocabulary, pieces)
        model = models.BPE(vocabulary, merges, unk_token=name, fuse_unk=True, byte_fallback=fallback)
    else:
        scored = [(piece, score) for piece, score, _ in pieces]
        model = models.Unigram(scored, unk_id=unknown, byte_fallback=fallback)
    tokenizer = tokenizers.Tokenizer(model)
    if prefixed and not legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        before = [normalizers.Prepend(SPACE)] if prefixed else []
        tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after = [decoders.Strip(content=" ", left=1, right=0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    for piece, _, kind in pieces:
        if kind in (UNKNOWN, CONTROL):
            tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True)])
        elif kind == USER:
            tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False)])
    for index, token in sorted(added.items()):
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != index:
            raise DataError(
                f"a tokenizer.model with an added token {token.content!r} that is not {index}: {_ADVICE}"
            )
    # Field 41 is the piece that begins a text. Its default is 1, and a negative value means none.
    begin = trainer.get(41, 1)
    if begin < len(pieces) and pieces[begin][2] == CONTROL:
        token = pieces[begin][0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, begin)]
        )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """All ways to join two pieces into a third, best piece first, as SentencePiece joins them."""
    merges = []
    for piece, score, _ in pieces:
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, pair) for pair in known]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [pair for _, pair in merges]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a protobuf message's fields. Values are bytes or integers. Raises
    ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value: bytes | int
            value, at = _varint(data, at)
        elif kind in (1, 2, 5):
            size = 8 if kind == 1 else 4
            if kind == 2:
                size, at = _varint(data, at)
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError("it ends within a field")
        else:
            raise ValueError("it is no SentencePiece model")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64 and at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("it ends within a number")
