"""Conversations as tokens, and which of them the assistant wrote.

The template is the tokenizer's: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`, as
transformers reads them. Rows are brought to the form that it reads (`conversations.py`) and rendered
(`templates.py`). It alone writes special tokens: none is put before or after a conversation.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from node.data.conversations import Conversation, Dropped, normalized
from node.data.templates import ChatTemplate, Rendered
from node.data.text import expanded
from node.data.tokenizer import (
    json_object,
    parsed_tokenizer,
    read_bounded,
    special_tokens,
    tokenizer_files,
)
from wire.errors import DataError

if TYPE_CHECKING:
    import tokenizers

CHAT_FORMAT = "4"
"""Raised when the same rows become other tokens or labels."""


class ChatEncoder:
    """Conversations as token ids with a mask. Unlike text, special tokens in the rendered text are
    special."""

    def __init__(self, bpe: "tokenizers.Tokenizer", template: ChatTemplate, fingerprint: str) -> None:
        self._bpe = bpe
        self._template = template
        self.fingerprint = fingerprint
        """Of the tokenizer, the template and the special tokens: the same with every version."""
        self.format = f"{CHAT_FORMAT} {template.version}"
        """Of what else decides on the tokens and labels of a row."""

    def encode(self, row: Mapping[str, Any], place: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [n], and bool [n]: which of them lie wholly in the assistant's text. Raises Dropped,
        DataError."""
        return self._tokens(self._template.render(normalized(row, place, self._template.forms)))

    def encode_all(
        self, rows: Iterable[tuple[str, Mapping[str, Any] | bytes | Dropped]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray] | Dropped]:
        """As `encode`, of several rows with their places at once; what is left out as its reason. Raises
        DataError."""
        read: list[Conversation | Dropped] = []
        for place, row in rows:
            assert not isinstance(row, bytes), "chat data comes in rows"
            try:
                if isinstance(row, Dropped):
                    raise row
                read.append(normalized(row, place, self._template.forms))
            except Dropped as reason:
                read.append(reason)
        rendered = iter(self._template.render_all([one for one in read if isinstance(one, Conversation)]))
        for one in read:
            found = one if isinstance(one, Dropped) else next(rendered)
            try:
                yield found if isinstance(found, Dropped) else self._tokens(found)
            except Dropped as reason:
                yield reason

    def _tokens(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._bpe.encode(rendered.text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int64)
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for start, stop in rendered.assistant:
            mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop) & (offsets[:, 1] > offsets[:, 0])
        if not mask.any():
            raise Dropped("no token of the assistant")
        return ids, mask

    @property
    def turn_ends(self) -> frozenset[int]:
        """The special token with which the assistant's turns end; empty if they end otherwise."""
        ids = self._bpe.encode(self._template.turn_end, add_special_tokens=False).ids
        return frozenset(ids[:1]) & self._bpe.get_added_tokens_decoder().keys()

    def question(self, text: str) -> list[int]:
        """Ids of a conversation whose only message is the user's `text`, up to the answer. Raises
        DataError."""
        try:
            rendered = self._template.prompt([{"role": "user", "content": text}])
        except Dropped as error:
            raise DataError(f"the chat template cannot render the prompt: {error}") from error
        return list(self._bpe.encode(rendered, add_special_tokens=False).ids)


def load_chat_encoder(tokenizer: str, template: str) -> ChatEncoder:
    """The encoder of `[data] tokenizer`, with `[data] chat_template` or the tokenizer's own.

    Raises DataError, ConfigError.
    """
    path = expanded(tokenizer, "data.tokenizer")
    files = tokenizer_files(path)
    tables = [read_bounded(file) for file in files]
    bpe = parsed_tokenizer(files, tables)
    bpe.no_truncation()
    bpe.no_padding()
    # It writes no special tokens here, and would take white space out of tokens' places in the text.
    bpe.post_processor = None
    folder = files[0].parent
    source, where = _template_source(folder, template)
    tokens = special_tokens(folder)
    rendering = _template(source, tuple(sorted(tokens.items())), where)
    parts = [*tables, source.encode(), json.dumps(tokens, sort_keys=True).encode()]
    fingerprint = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
    return ChatEncoder(bpe, rendering, fingerprint)


@lru_cache(maxsize=2)
def _template(source: str, tokens: tuple[tuple[str, str], ...], where: str) -> ChatTemplate:
    """One process for the training data, the held-out data and whatever else has this template."""
    return ChatTemplate(source, dict(tokens), where)


def _template_source(folder: Path, named: str) -> tuple[str, str]:
    path = expanded(named, "data.chat_template").resolve() if named else folder / "chat_template.jinja"
    if named or path.exists():
        try:
            return read_bounded(path).decode(), str(path)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: copy it again") from error
    path = folder / "tokenizer_config.json"
    found = json_object(path).get("chat_template")
    if isinstance(found, list):  # named templates: [{"name", "template"}]
        named_default = (one for one in found if isinstance(one, dict) and one.get("name") == "default")
        found = next((one.get("template") for one in named_default), None)
    if not isinstance(found, str):
        raise DataError(
            f"the tokenizer in {folder} has no chat template: set [data] chat_template to a Jinja file"
        )
    return found, str(path)
