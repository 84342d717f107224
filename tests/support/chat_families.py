"""Chat templates with the behaviour of published ones, and a tokenizer that has their special tokens."""

import json
from pathlib import Path

import tokenizers

FAMILIES = ("chatml", "qwen3", "llama3", "gemma3", "mistral")
SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        "<|eot_id|>",
    ),
    "gemma3": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "mistral": (
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
}
BEGIN = {"llama3": "<|begin_of_text|>", "gemma3": "<bos>", "mistral": "<s>"}
END = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "mistral": "</s>",
}
"""What ends an answer."""


def template_of(family: str) -> str:
    """The Jinja source."""
    return (Path(__file__).with_name("chat_templates") / f"{family}.jinja").read_text(encoding="utf-8")


def write_tokenizer_of(folder: Path, family: str) -> Path:
    """`tokenizer.json` with single bytes and the family's special tokens, and its template."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    rules = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL[family]),
        show_progress=False,
    )
    bpe.train_from_iterator(["user assistant model system tool role content name arguments"], rules)
    if begin := BEGIN.get(family):
        bpe.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, bpe.token_to_id(begin))]
        )
    folder.mkdir(parents=True)
    bpe.save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": END[family], **({"bos_token": BEGIN[family]} if family in BEGIN else {})}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template_of(family), encoding="utf-8")
    return folder
