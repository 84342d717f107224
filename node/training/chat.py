"""Render conversations by a chat template and say which tokens the assistant wrote.

A row holds `messages` ([{"role", "content"}], OpenAI's form) or `conversations` ([{"from", "value"}],
ShareGPT's). The template is the tokenizer's: `chat_template.jinja`, or `chat_template` in
`tokenizer_config.json`, as transformers reads them. The assistant's text is what the template marks by `{%
generation %}`. A template without marks is rendered up to each message: what the assistant's message adds to
the prompt is the assistant's.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from node.training.text import expanded, read_file
from node.training.tokenizer import special_tokens
from wire.errors import DataError

if TYPE_CHECKING:
    import tokenizers

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
ASSISTANT = "assistant"

Message = dict[str, Any]
Span = tuple[int, int]
"""From a character to another."""


class Dropped(Exception):
    """A conversation cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the parts of it that the assistant wrote."""

    text: str
    assistant: tuple[Span, ...]


def messages_of(row: Mapping[str, Any], place: str) -> list[Message]:
    """The row's messages with the roles of templates. Raises DataError if there are none."""
    found = row.get("messages")
    if isinstance(found, list) and all(isinstance(one, dict) and "role" in one for one in found):
        return [{key: value for key, value in one.items() if value is not None} for one in found]
    found = row.get("conversations")
    if isinstance(found, list) and all(
        isinstance(one, dict) and {"from", "value"} <= one.keys() for one in found
    ):
        return [
            {"role": SHAREGPT_ROLES.get(one["from"], one["from"]), "content": one["value"]} for one in found
        ]
    raise DataError(
        f'{place} holds no conversation: expected "messages" with role and content, or "conversations" with '
        f"from and value, got {', '.join(row) or 'an empty row'}"
    )


class ChatTemplate:
    """A compiled template. Templates are sandboxed: they come with models from anywhere."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """
        Args:
            tokens: `bos_token`, `eos_token` and the like, which templates refer to.
            where: the template's place for messages.
        """
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError as error:
            raise DataError('chat data needs the jinja2 package: pip install "thinwire[data]"') from error
        self._tokens = dict(tokens)
        self._spans: list[Span] = []
        self._blocks: list[str] = []
        marks = _generation_tag(self._blocks, self._spans)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[marks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template in {where} cannot be read: {error}") from error
        self._error: type[Exception] = jinja2.TemplateError
        self._marked = "{% generation" in source or "{%- generation" in source

    def render(self, messages: Sequence[Message], row: Mapping[str, Any] | None = None) -> Rendered:
        """The conversation as text, with the assistant's spans. Raises Dropped."""
        if not any(message["role"] == ASSISTANT for message in messages):
            raise Dropped("no assistant message")
        extra = {key: row[key] for key in ("tools", "documents") if row and row.get(key)}
        text = self._text(messages, extra, prompt=False)
        if self._marked:
            return Rendered(text, tuple(self._spans))
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._text(messages[:index], extra, prompt=True) if index else ""
            after = self._text(messages[: index + 1], extra, prompt=False)
            # A template may rewrite earlier turns once later ones follow.
            if not text.startswith(after) or not after.startswith(before):
                raise Dropped("the template has no {% generation %} marks and rewrites earlier messages")
            spans.append((len(before), len(after)))
        return Rendered(text, tuple(spans))

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the assistant's next message begins. Raises Dropped."""
        return self._text(messages, {}, prompt=True)

    def _text(self, messages: Sequence[Message], extra: Mapping[str, Any], *, prompt: bool) -> str:
        self._spans.clear()
        self._blocks.clear()
        values = {**self._tokens, **extra, "messages": list(messages), "add_generation_prompt": prompt}
        try:
            for block in self._template.generate(values):
                self._blocks.append(block)
        except (self._error, TypeError, KeyError, ValueError) as error:
            raise Dropped(f"the template refuses it: {' '.join(str(error).split())[:100]}") from error
        return "".join(self._blocks)


class ChatEncoder:
    """Conversations as token ids with a mask. Unlike text, special tokens in the rendered text are
    special."""

    def __init__(self, bpe: "tokenizers.Tokenizer", template: ChatTemplate, fingerprint: str) -> None:
        self._bpe = bpe
        self._template = template
        self.fingerprint = fingerprint

    def encode(self, row: Mapping[str, Any], place: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [n], and bool [n]: which of them lie wholly in the assistant's text. Raises Dropped,
        DataError."""
        rendered = self._template.render(messages_of(row, place), row)
        encoded = self._bpe.encode(rendered.text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int64)
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for start, stop in rendered.assistant:
            mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop) & (offsets[:, 1] > offsets[:, 0])
        if not mask.any():
            raise Dropped("no token of the assistant")
        return ids, mask

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
    folder = path if path.is_dir() else path.parent
    try:
        import tokenizers
    except ImportError as error:
        raise DataError('chat data needs the tokenizers package: pip install "thinwire[data]"') from error
    file = folder / "tokenizer.json" if path.is_dir() else path
    try:
        tables = read_file(file)
        bpe = tokenizers.Tokenizer.from_str(tables.decode())
    except OSError as error:
        raise DataError(f"chat data needs {file}, which cannot be read: {error.strerror}") from error
    except Exception as error:  # the package raises bare Exception for bad tables
        raise DataError(f"the tokenizer in {file} cannot be read ({error}); copy its files again") from error
    bpe.no_truncation()
    bpe.no_padding()
    source, where = _template_source(folder, template)
    tokens = special_tokens(folder)
    parts = [tables, source.encode(), json.dumps(tokens, sort_keys=True).encode()]
    fingerprint = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
    return ChatEncoder(bpe, ChatTemplate(source, tokens, where), fingerprint)


def _template_source(folder: Path, named: str) -> tuple[str, str]:
    try:
        if named:
            path = expanded(named, "data.chat_template")
            return read_file(path).decode(), str(path)
        path = folder / "chat_template.jinja"
        if path.exists():
            return read_file(path).decode(), str(path)
        path = folder / "tokenizer_config.json"
        found = json.loads(read_file(path)).get("chat_template") if path.exists() else None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read: {reason}") from error
    if isinstance(found, list):  # named templates: [{"name", "template"}]
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    if not isinstance(found, str):
        raise DataError(
            f"the tokenizer in {folder} has no chat template: set [data] chat_template to a Jinja file"
        )
    return found, str(path)


def _generation_tag(blocks: list[str], spans: list[Span]) -> Any:
    """A Jinja extension for `{% generation %}`: appends the span of each such block to `spans`.

    The template is rendered block by block into `blocks`, so that a block knows where it starts.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_span"), [], [], body).set_lineno(line)

        def _span(self, caller: Callable[[], str]) -> str:
            text = str(caller())
            start = sum(map(len, blocks))
            spans.append((start, start + len(text)))
            return text

    return GenerationTag


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> str:
    raise ValueError(message)


def _now(form: str) -> str:
    """A fixed day: a run's tokens must not depend on when they are made."""
    return datetime(2025, 1, 1).strftime(form)
