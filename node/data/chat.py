"""Conversations as tokens, with a mask of the tokens that the assistant wrote.

The chat template is the tokenizer's: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`, as
in transformers. Rows are converted to the form that it reads (`conversations.py`) and rendered
(`templates.py`). Only the template writes special tokens: none are added before or after a conversation.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from node.config.schema import DataSection
from node.data.conversations import (
    ASSISTANT,
    ROLES,
    THOUGHT_END,
    TOOL,
    USER,
    Conversation,
    Dropped,
    has_zero_label,
    normalized,
    question,
    thoughts_of,
    tools_of,
    words_of,
)
from node.data.templates import ChatTemplate, Rendered
from node.data.text import expanded
from node.data.tokenizer import (
    SpecialTokens,
    begin_text,
    json_object,
    one_line,
    parsed_tokenizer,
    read_bounded,
    special_tokens,
    tokenizer_files,
)
from wire.errors import DataError

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""Where a tokenizer's folder has the template of conversations with tools."""
CHAT_FORMAT = "18"
"""Increase this when the same rows give other tokens or labels."""
_FIRST_TAG = re.compile(r"\s*(<[^<>\s]{1,40}>)")
_END_CHARACTERS = 20
"""This much of a message's end is looked for in the text."""
MARKED_TEXT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}"
    "{% if eos_token and not message['content'].endswith(eos_token) %}{{ eos_token }}{% endif %}"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""The template of rows that are already text. It only adds the end of the text; `_beginning` goes before
it."""


def _beginning(begin: str) -> str:
    """The part of a template that writes what the tokenizer puts before a text, unless the text has it."""
    literal = json.dumps(begin)
    missing = f"not messages[0]['content'].startswith({literal})"
    return f"{{% if {missing} %}}{{{{ {literal} }}}}{{% endif %}}" if begin else ""


def marker_template(marker: str, begin: str) -> str:
    """A chat template for a model that was trained with `data.response_marker`.

    A question ends with the marker, as in `Marker.question`; an answer ends with the end of the text.

    Args:
        begin: what the tokenizer puts before a text.
    """
    literal = json.dumps(marker)
    return _beginning(begin) + (
        "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}"
        "{{ eos_token or '' }}{% elif message['role'] == 'user' and "
        f"{literal} not in message['content'] %}}{{{{ {literal} }}}}{{% endif %}}{{% endfor %}}"
    )


@dataclass(frozen=True)
class Marker:
    """Separates the answer from the rest of a row's text (`[data] response_marker`)."""

    text: str
    field: str

    def conversation(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        """The row as messages. The answer is the text after the last marker.

        Raises:
            Dropped: the row has no answer.
            DataError: the field holds no text.
        """
        value = row.get(self.field)
        if value is None and self.field in row:
            raise Dropped("null")
        if not isinstance(value, str):
            raise DataError(
                f"{place} has no text in field {self.field!r}: set [data] jsonl_field to its name"
            )
        before, marker, answer = value.rpartition(self.text)
        if not marker or not answer.strip():
            raise Dropped("no answer behind data.response_marker")
        asked = {"role": USER, "content": before + marker}
        return {"messages": [asked, {"role": ASSISTANT, "content": answer}]}

    def question(self, text: str) -> str:
        """A prompt that ends where the answer begins."""
        return text if self.text in text else text + self.text


class ChatEncoder:
    """Encodes conversations as token ids with a mask. Special tokens in the rendered text are special, unlike
    those in plain text."""

    def __init__(
        self,
        bpe: "tokenizers.Tokenizer",
        template: ChatTemplate,
        fingerprint: str,
        path: Path,
        marker: Marker | None = None,
        with_tools: ChatTemplate | None = None,
    ) -> None:
        """
        Args:
            path: the tokenizer's path, for messages.
            with_tools: the template of conversations with tools, if they have another one.
        """
        self._bpe = bpe
        self._path = path
        self._template = template
        self._with_tools = with_tools
        self._marker = marker
        self._special = SpecialTokens(bpe)
        self._said_role = False
        self.fingerprint = fingerprint
        """A fingerprint of the tokenizer, the template and the special tokens. It is the same with every
        version."""
        self.format = f"{CHAT_FORMAT} {template.version}"
        """The version of everything else that determines the tokens and labels of a row."""

    def encode(self, row: Mapping[str, Any], place: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [n], and bool [n]: whether a token has some of the assistant's text.

        Raises:
            Dropped: the conversation cannot be trained on.
            DataError: the row is no conversation.
        """
        (encoded,) = self.encode_all([(place, row)])
        if isinstance(encoded, Dropped):
            raise encoded
        return encoded

    def encode_all(
        self, rows: Iterable[tuple[str, Mapping[str, Any] | bytes | Dropped]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray] | Dropped]:
        """`encode` for several rows, given with their places. A row that is left out gives its reason.

        Raises:
            DataError: a row is no conversation.
        """
        read: list[ChatTemplate | Dropped] = []
        waiting: dict[ChatTemplate, list[Conversation]] = {}
        for place, row in rows:
            assert not isinstance(row, bytes), "chat data comes in rows"
            try:
                if isinstance(row, Dropped):
                    raise row
                conversation, template = self._conversation(row, place)
                waiting.setdefault(template, []).append(conversation)
                read.append(template)
            except Dropped as reason:
                read.append(reason)
        rendered = {
            template: zip(several, template.render_all(several), strict=True)
            for template, several in waiting.items()
        }
        for item in read:
            if isinstance(item, Dropped):
                yield item
                continue
            conversation, result = next(rendered[item])
            try:
                if isinstance(result, Dropped):
                    raise result
                for whose in _left_out(conversation, result.text):
                    _say_no_content(str(self._path), whose)
                for index in conversation.trained:
                    thoughts = thoughts_of(conversation.messages[index])
                    if any(thought not in result.text for thought in thoughts):
                        _say_no_thoughts(str(self._path), index == conversation.trained[-1])
                contents = (words_of(message.get("content")) for message in conversation.messages)
                # The text before a marker is that of a whole conversation.
                if self._marker is None and (token := self._special.found_in(contents)):
                    _say_special(str(self._path), token)
                for tag in _written_twice(conversation, result.text):
                    _say_twice(str(self._path), tag)
                yield self._tokens(result)
            except Dropped as reason:
                yield reason

    def _conversation(self, row: Mapping[str, Any], place: str) -> tuple[Conversation, ChatTemplate]:
        if self._marker is not None:
            row = self._marker.conversation(row, place)
        template = self._template
        if self._with_tools is not None and tools_of(row, place):
            template = self._with_tools
        conversation = normalized(row, place, template.forms)
        if has_zero_label(row):
            _say_zero_label(str(self._path))
        if conversation.others:
            _say_others(str(self._path))
        if conversation.nulls:
            _say_nulls(str(self._path))
        roles = (message["role"] for message in conversation.messages)
        known = {*chain(*ROLES.values()), *template.forms.roles}
        if not self._said_role and (role := next((role for role in roles if role not in known), "")):
            self._said_role = True
            logger.warning(
                "messages have the role %s, which neither the chat template for %s nor thinwire knows: they "
                "have no labels; give those of the assistant that role",
                role[:50],
                self._path,
            )
        return conversation, template

    def _tokens(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._encoded(rendered.text)
        ids = np.array(encoded.ids, dtype=np.int64)
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for start, stop in rendered.assistant:
            # A token may begin with the white space before an answer and still contain its first word.
            mask |= (offsets[:, 0] < stop) & (offsets[:, 1] > start) & (offsets[:, 1] > offsets[:, 0])
        if not mask.any():
            raise Dropped("no token of the assistant")
        return ids, mask

    def report_turn_end(self) -> None:
        """Warn, once for a tokenizer, if no token of its own ends the assistant's turns."""
        if not self.turn_ends:
            _say_no_turn_end(str(self._path), self._template.turn_end)

    @property
    def turn_ends(self) -> frozenset[int]:
        """The special token that ends the assistant's turns; empty if they end otherwise. White space may
        stand before it, as in Llama 2's template."""
        ids = self._encoded(self._template.turn_end.lstrip()).ids
        return frozenset(ids[:1]) & self._bpe.get_added_tokens_decoder().keys()

    def question(self, text: str, system: str = "") -> list[int]:
        """The ids of a conversation up to the answer to the user's `text`, its first message except for that
        of the `system`.

        Raises:
            DataError: the template cannot render the prompt.
        """
        if self._marker is not None:
            text = self._marker.question(text)
        try:
            rendered = self._template.prompt(question(text, system, self._template.forms))
        except Dropped as error:
            raise DataError(f"the chat template cannot render the prompt: {error}") from error
        return list(self._encoded(rendered).ids)

    def _encoded(self, text: str) -> "tokenizers.Encoding":
        with one_line(self._path, "cannot encode this text"):
            return self._bpe.encode(text, add_special_tokens=False)


def load_chat_encoder(tokenizer: str, template: str, marker: Marker | None = None) -> ChatEncoder:
    """The encoder of `[data] tokenizer`, with `[data] chat_template` or the tokenizer's own template. With a
    `marker`, rows are text, and no template is needed.

    Raises:
        DataError: the tokenizer or the template cannot be read.
        ConfigError: a path names the home directory of an unknown user.
    """
    path = expanded(tokenizer, "data.tokenizer")
    files = tokenizer_files(path)
    bpe, tables = parsed_tokenizer(files)
    bpe.no_truncation()
    bpe.no_padding()
    beginning = _beginning(begin_text(bpe)) if marker is not None else ""
    # The post-processor writes no special tokens here, and would drop white space from tokens' positions in
    # the text.
    bpe.post_processor = None
    folder = files[0].parent
    sources, where = _template_sources(folder, template) if marker is None else ([MARKED_TEXT], "thinwire")
    tokens = special_tokens(folder)
    named = tuple(sorted(tokens.items()))
    templates = [_template(f"{beginning}{source}", named, where) for source in sources]
    parts = [*tables, sources[0].encode(errors="surrogatepass"), json.dumps(tokens, sort_keys=True).encode()]
    parts += [source.encode(errors="surrogatepass") for source in sources[1:]]
    parts += [repr(marker).encode()] if marker is not None else []
    fingerprint = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
    return ChatEncoder(bpe, templates[0], fingerprint, path, marker, *templates[1:])


def _left_out(conversation: Conversation, text: str) -> Iterator[str]:
    """The messages whose content does not stand in the text, by their end. Results of tools may be written
    in another form."""
    text = text.lower()
    for index, message in enumerate(conversation.messages):
        if message["role"] in ROLES[TOOL]:
            continue
        # Templates leave out the thoughts of earlier answers.
        words = words_of(message.get("content")).rpartition(THOUGHT_END)[2]
        end = words.strip()[-_END_CHARACTERS:]
        if end.lower() not in text:
            yield "answers" if index in conversation.answers else f"{message['role']} messages"


def _written_twice(conversation: Conversation, text: str) -> Iterator[str]:
    """The tags that messages begin with and that the template writes before them, too."""
    for message in conversation.messages:
        words = words_of(message.get("content"))
        if match := _FIRST_TAG.match(words):
            twice = re.compile(rf"{re.escape(match[1])}\s*{re.escape(match[1])}")
            if twice.search(text) and not twice.search(words):
                yield match[1]


@cache
def _say_twice(tokenizer: str, tag: str) -> None:
    logger.warning(
        "messages begin with %s, which the chat template for %s writes before them, too: remove it from the "
        "messages, with what ends it",
        tag,
        tokenizer,
    )


@cache
def _say_no_content(tokenizer: str, whose: str) -> None:
    logger.warning(
        "the chat template for %s leaves out or changes the content of %s, and the run is trained on what "
        "it writes: look at it with `thinwire data preview`. Messages have a role and a content",
        tokenizer,
        whose,
    )


@cache
def _say_special(tokenizer: str, token: str) -> None:
    logger.warning(
        "messages have %s in their content, which is a special token of %s and counts as that token: remove "
        "it if the template writes it too",
        token,
        tokenizer,
    )


@cache
def _say_zero_label(tokenizer: str) -> None:
    """`tokenizer` only tells one data set's report from another's."""
    logger.warning(
        "rows have the number 0 as their label, and are trained on: if it means that people rejected the "
        "answer, write false instead of 0, or remove these rows"
    )


@cache
def _say_others(tokenizer: str) -> None:
    """`tokenizer` only tells one data set's report from another's."""
    logger.warning(
        "messages that the assistant did not write are marked to be trained on (`train`, or a weight of 1): "
        "they have no labels all the same; give them the assistant's role if they shall have some"
    )


@cache
def _say_nulls(tokenizer: str) -> None:
    """`tokenizer` only tells one data set's report from another's."""
    logger.warning(
        "calls have null as an argument, which is left out, because tables fill in null for an absent one: "
        "give the arguments as JSON text if null is meant"
    )


@cache
def _say_no_thoughts(tokenizer: str, last: bool) -> None:
    logger.warning(
        "the chat template for %s leaves out the reasoning of %s: set data.chat_template to one that writes "
        "it%s",
        tokenizer,
        "answers, so it is not trained on" if last else "earlier answers, so the model learns not to think",
        "" if last else ", or mark these answers with `train: false`",
    )


@cache
def _say_no_turn_end(tokenizer: str, end: str) -> None:
    logger.warning(
        "the chat template ends answers with %r, which is no special token of %s: generated text does not "
        "stop there; add the token to the tokenizer, or set data.chat_template to one with its tokens",
        end[:50],
        tokenizer,
    )


def chat_encoder(data: DataSection) -> ChatEncoder:
    """The encoder of a run's conversations. Raises DataError and ConfigError as `load_chat_encoder`."""
    marker = Marker(data.response_marker, data.jsonl_field) if data.response_marker else None
    encoder = load_chat_encoder(data.tokenizer, data.chat_template, marker)
    encoder.report_turn_end()
    return encoder


@lru_cache(maxsize=4)
def _template(source: str, tokens: tuple[tuple[str, str], ...], where: str) -> ChatTemplate:
    """The rendering process, shared by the training data, the held-out data and all others with this
    template."""
    return ChatTemplate(source, dict(tokens), where)


def _template_sources(folder: Path, named: str) -> tuple[list[str], str]:
    """The template, then the template of conversations with tools if there is one; and where they are."""
    path = folder / "chat_template.jinja"
    if named:
        path = Path(os.path.realpath(expanded(named, "data.chat_template")))
    if named or path.exists():
        paths = [path, *([] if named else filter(Path.exists, [folder / TOOL_TEMPLATE]))]
        return [_jinja(path) for path in paths], str(path)
    path = folder / "tokenizer_config.json"
    value = json_object(path).get("chat_template")
    if isinstance(value, list):  # named templates: [{"name", "template"}]
        entries = (entry for entry in value if isinstance(entry, dict))
        value = {str(entry.get("name")): entry.get("template") for entry in entries}
    named_templates = value if isinstance(value, dict) else {"default": value}
    sources = [named_templates.get(name) for name in ("default", "tool_use")]
    if not isinstance(sources[0], str):
        others = [name for name, source in named_templates.items() if isinstance(source, str)]
        which = f"named default, only {', '.join(others)[:100]}" if others else ""
        raise DataError(
            f"the tokenizer in {folder} has no chat template {which}".rstrip()
            + ": set [data] chat_template to a Jinja file"
        )
    return [source for source in sources if isinstance(source, str)], str(path)


def _jinja(path: Path) -> str:
    """The template in a file. Raises DataError if it is no text, or JSON that holds a template."""
    try:
        source = read_bounded(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: copy it again") from error
    with suppress(ValueError, RecursionError):
        json.loads(source)
        raise DataError(f"{path} is JSON: save the template in it as a Jinja file of its own")
    return source
