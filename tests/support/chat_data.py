"""A small tokenizer with a chat template, and conversations, as people have them."""

import json
from pathlib import Path
from typing import Any

import tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
WORDS = ("river", "seven", "why", "because", "blue", "answers", "nobody", "\u4e2d\u6587", "\U0001f600")


def write_tokenizer(folder: Path, template: str = TEMPLATE, vocabulary: int = 400) -> Path:
    """`tokenizer.json` and `tokenizer_config.json` of a byte-level BPE."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    bpe.train_from_iterator([text for row in conversations(40) for text in _contents(row)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "chat_template": template,
        "eos_token": "<|im_end|>",
        "bos_token": {"content": "<|endoftext|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def conversations(count: int) -> list[dict[str, Any]]:
    """Rows with `messages` of two or four turns."""
    rows = []
    for number in range(count):
        turns = []
        for turn in range(1 + number % 2):
            words = [WORDS[(number * 7 + turn * 3 + k) % len(WORDS)] for k in range(3 + number % 5)]
            turns.append({"role": "user", "content": f"question {number}: {' '.join(words)}?"})
            turns.append({"role": "assistant", "content": f"{' '.join(reversed(words))}, {number * number}."})
        rows.append({"messages": turns})
    return rows


def sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    """The same conversation in ShareGPT's form."""
    names = {"user": "human", "assistant": "gpt"}
    return {
        "conversations": [{"from": names[one["role"]], "value": one["content"]} for one in row["messages"]]
    }


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _contents(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]]
