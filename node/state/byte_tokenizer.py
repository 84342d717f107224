"""Writes the tokenizer `bytes` as files for other programs. It has one token per byte, with the byte's
value as its id.

`tokenizer.json` is for transformers and vLLM. llama.cpp's converter recognizes only published byte-pair
tables, by their hashes, but accepts any SentencePiece model. So the same vocabulary is also written to
`tokenizer.model`, which the converter reads first for all families except GPT-2 and OLMo 2.
"""

import struct
from typing import Any

from node.data.sentencepiece import SPACE

BYTE_SETTINGS: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    # Without these, llama.cpp puts a space and token 1 before every text.
    "add_prefix_space": False,
    "add_bos_token": False,
}
"""The content of `tokenizer_config.json`."""
_NORMAL, _UNKNOWN, _BYTE = 1, 2, 6
_BPE = 2


def byte_tokenizer() -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # GPT-2's alphabet: printable bytes represent themselves, others map to characters from 256 on.
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


def byte_pieces() -> bytes:
    """The content of `tokenizer.model`: SentencePiece's ModelProto without merges, with byte fallback.

    Piece 32 is the space. SentencePiece also requires a byte 32 and an unknown piece. They come last, beyond
    the vocabulary of 256. The character that SentencePiece writes for a space decodes to a space, too.
    """
    pieces = [(f"<0x{byte:02X}>", _BYTE) for byte in range(256)]
    pieces += [pieces[32], ("<unk>", _UNKNOWN)]
    pieces[32] = SPACE, _NORMAL
    written = [
        _message(1, _text(1, piece) + _float(2, 0.0) + _number(3, kind))  # pieces
        for piece, kind in pieces
    ]
    # model_type, vocab_size, byte_fallback, the id of the unknown piece, and -1 for pieces that do not exist.
    trainer = _number(3, _BPE) + _number(4, len(pieces)) + _number(35, 1) + _number(40, len(pieces) - 1)
    trainer += b"".join(_number(field, -1) for field in (41, 42, 43))
    # No space before the text, no merged spaces, and spaces written as above.
    normalizer = _text(1, "identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    return b"".join(written) + _message(2, trainer) + _message(3, normalizer)


def _varint(value: int) -> bytes:
    """A number in protobuf's varint format; negative numbers are 64-bit two's complement."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())
