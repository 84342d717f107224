"""Trains a byte-level BPE on a run's text, so that a run from scratch needs no published tokenizer."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from node.config.schema import DataSection
from node.data.conversations import Dropped, Forms, normalized
from node.data.documents import list_source, needs_shards, read_rows, read_text, text_of
from node.data.text import JSON_SUFFIXES, SEPARATOR, STDLIB, TABLES, content_suffix, expanded, write_whole
from node.data.tokenizer import END_OF_TEXT, load_tokenizer
from wire.errors import DataError, UserError

TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. Only the assistant's text gives labels."""
LEAST_VOCABULARY = 256 + 3
"""All bytes and the special tokens."""
MOST_VOCABULARY = 1_000_000
"""The `tokenizers` package allocates memory for all of them in advance."""


def _texts(data: DataSection) -> Iterator[str]:
    """The documents, also those of tables. Raises DataError."""
    if data.path == STDLIB or not needs_shards(expanded(data.path, "data.path")):
        yield from (part.decode() for part in read_text(data).split(SEPARATOR))
        return
    source = list_source(data.path)
    if source.is_tokens:
        raise DataError(f"{data.path} holds token ids: name the text that they were made of")
    for shard in source.shards:
        for place, row in read_rows(shard, data, skips=source.skips):
            with suppress(Dropped):
                yield text_of(row, place, data).decode()


def _texts_of_chat(data: DataSection) -> Iterator[str]:
    """The documents, or the messages of conversations, if the rows have no text. Raises DataError."""
    texts = _texts(data)
    try:
        return chain([next(texts, "")], texts)
    except DataError:
        source = list_source(data.path)
        files = [extent.path for shard in source.shards for extent in shard.extents]
        if any(content_suffix(file) not in (*JSON_SUFFIXES, *TABLES) for file in files):
            raise
    return (
        text
        for shard in source.shards
        for place, row in read_rows(shard, replace(data, format="chat"), skips=source.skips)
        if isinstance(row, dict)
        for text in _messages(row, place)
    )


def _messages(row: dict[str, Any], place: str) -> Iterator[str]:
    """The texts of a conversation. One that cannot be trained on has none. Raises DataError."""
    with suppress(Dropped):
        yield from (str(message["content"]) for message in normalized(row, place, Forms()).messages)


def train_tokenizer(data: DataSection, vocabulary: int, out: Path, *, chat: bool) -> int:
    """Train a tokenizer on the text of `data`, and write it into the new folder `out` in transformers'
    format. The same text gives the same tables.

    Args:
        vocabulary: the most tokens, including special ones. A small text has fewer.
        chat: also write a chat template, ChatML. The rows may be conversations.

    Returns:
        The number of its tokens.

    Raises:
        UserError: `out` is in use, or the vocabulary's size is out of range.
        DataError: the text cannot be read, or `tokenizers` is not installed.
    """
    if not LEAST_VOCABULARY <= vocabulary <= MOST_VOCABULARY:
        raise UserError(
            f"a vocabulary has {LEAST_VOCABULARY} to {MOST_VOCABULARY:,} tokens, got {vocabulary}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is in use: name a new folder")
    try:
        import tokenizers
    except ImportError:
        raise UserError('training a tokenizer needs: pip install "tokenizers>=0.21"') from None

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *((TURN_BEGIN, TURN_END) if chat else ())],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts_of_chat(data) if chat else _texts(data), trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    if chat:
        settings["chat_template"] = CHAT_TEMPLATE
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "tokenizer.json", bpe.to_str())
        write_whole(out / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; name another folder") from error
    return load_tokenizer(str(out)).vocabulary
