"""Trains a byte-level BPE on a run's text, so that a run from scratch needs no published tokenizer."""

import json
from pathlib import Path

from node.config.schema import DataSection
from node.data.documents import read_text
from node.data.text import SEPARATOR, write_whole
from node.data.tokenizer import END_OF_TEXT, load_tokenizer
from wire.errors import UserError

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


def train_tokenizer(data: DataSection, vocabulary: int, out: Path, *, chat: bool) -> int:
    """Train a tokenizer on the text of `data`, and write it into the new folder `out` in transformers'
    format. The same text gives the same tables.

    Args:
        vocabulary: the most tokens, including special ones. A small text has fewer.
        chat: also write a chat template, ChatML.

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

    text = read_text(data)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *((TURN_BEGIN, TURN_END) if chat else ())],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((part.decode() for part in text.split(SEPARATOR)), trainer)
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
