"""Converts conversations from the formats in which people store them to the one that a chat template reads.

A row holds `messages` ([{"role", "content"}], OpenAI's format) or `conversations` ([{"from", "value"}],
ShareGPT's), as a list or as JSON text, optionally with `tools`, `functions`, `documents`, `system` and
`chat_template_kwargs`. The turns may also be pairs of a question and its answer, or texts of the user and the
assistant by turns. Or a row holds one question and its answer: `instruction`, `input` and `output` (Alpaca's
format), or `prompt` and `completion`. The conversion is pure: the same row and the same `Forms` give the same
conversation.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from node.data.text import utf8, without_marks
from wire.errors import DataError

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = {
    SYSTEM: ("system", "developer"),
    USER: ("user", "human", "prompter", "customer", "student"),
    ASSISTANT: (
        "assistant",
        "gpt",
        "model",
        "bot",
        "chatbot",
        "ai",
        "chatgpt",
        "bing",
        "bard",
        "claude",
        "llm",
        "agent",
        "teacher",
    ),
    TOOL: ("tool", "function", "observation", "function_response", "tool_response", "tool_result", "ipython"),
}
"""The roles of templates, each with the names that people use for it."""
CALLS = ("function_call", "tool_call")
"""Roles of messages whose content is a call in JSON. The assistant writes these."""
MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog")
"""Columns that may hold a conversation. The first one that does is read."""
QUESTIONS = ("instruction", "prompt", "question", "query")
"""Columns that may hold a question. The first one that has a value is read."""
INPUTS = ("input", "context")
"""Columns that may hold the context of a question, or the question itself if there is no other."""
ANSWERS = ("output", "completion", "response", "answer")
"""Columns that may hold its answer."""
HISTORY = "history"
"""The column with earlier questions and their answers, in pairs (LLaMA-Factory's format)."""
SYSTEMS = ("system", "system_prompt", "system_message")
"""Columns that may hold a system prompt."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns with media that the messages are about."""
ZEROS = ("0", "0.0")
TAGS = {"label": ("false",), "kto_tag": ("false", *ZEROS)}
"""Columns that say that people rejected the answer (KTO's format), each with the values that say it, in lower
case. A number as a label may be a class, except beside a prompt and its completion (TRL's format)."""
TRAINED = (
    *("weight", "weights", "loss_weight", "loss", "loss_mask"),
    *("train", "training", "train_on_turn", "trainable", "output_with_loss"),
)
"""Keys by which a message or a row says, with 0 or false, that it has no labels."""
MASKED = ("masked", "ignore")
"""Keys by which a message or a row says, with 1 or true, that it has no labels."""
MEASURED = "loss"
"""The one of these keys that may also hold a measured number; in a row it always does."""
ROW_MARKS = tuple(key for key in (*TRAINED, *MASKED) if key != MEASURED)
"""Columns that say so for all messages of a row, or with a list for each."""
MASK = "mask"
"""The key with which a row names the roles whose messages have no labels; all others have some (NeMo's
format)."""
KIND, ATTRIBUTES = "type", ("VALUE_TO_TEXT", "TEXT_TO_VALUE")
"""The key of a row, and its values that say that turns have attributes, which the answer follows or the model
predicts (NeMo's format)."""
DETAIL = "train_detail"
"""The key with which a message gives labels to some of its characters (axolotl's format)."""
SETTINGS = "chat_template_kwargs"
"""The column with a row's own variables of the chat template, such as `enable_thinking` (TRL's format)."""
CONTENTS = ("content", "value", "text")
"""Keys that may hold a message's content. The first one that is not empty is read."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys that may hold a message's reasoning. Templates read the first."""
CHANNEL, ANALYSIS = "channel", "analysis"
"""The key of a message, and its value that says that it is the reasoning of the answer behind it (Harmony's
format)."""
ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys that may hold a call's arguments: OpenAI's, and those of Llama, LangChain and Anthropic."""
TOOLS = ("tools", "tool_defs", "functions")
"""Columns that may hold the tools. The first one that does is read."""
SCHEMA = "input_schema"
"""Anthropic's name of a tool's parameters."""
PREFERENCES = ("chosen", "rejected")
"""The columns of a better and a worse answer."""
THOUGHT, THOUGHT_END = "<think>", "</think>"
"""Around a thought that stands in an answer's content."""
TEXT_PARTS = ("text", "input_text", "output_text")
THOUGHT_PARTS = ("thinking", "reasoning")
CALL_PARTS = ("tool_use", "tool_call")
RESULT_PART = "tool_result"
"""The types of parts of a message's content (OpenAI's, Mistral's, Anthropic's and LLaMA-Factory's)."""
LEFT_OUT = "tool calls that the template leaves out"
"""The reason for leaving out a conversation whose calls would not be in its text."""
_REPAIR = "repair or remove that row"
_PARTLY = "labels for parts of a message"
_UNANSWERED = "a thought without an answer"
_UNCLEAR_MASK = "a mask that does not say what 1 means"
_MARK = re.compile("loss|train|learn|mask")
"""What the names of marks say that have other names than those of `TRAINED` and `MASKED`."""
_MASKS = re.compile("mask|ignore|skip|exclude|no_|not_|without")
"""What the names of those of them say that are true for a message without labels."""
_PARTS = re.compile(r'\s*\[\s*\{\s*"')
"""The beginning of parts of a content that are given as JSON text."""
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_NUMBERS = dict.fromkeys(("true", "1", "1.0", "yes", "on"), 1) | dict.fromkeys(
    ("false", *ZEROS, "no", "off"), 0
)
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
_PAIRED = {**_ROLE_OF, "input": USER, "output": ASSISTANT}
"""The roles of what a pair of turns holds, by its keys."""

Message = dict[str, Any]


class Dropped(Exception):
    """Raised for a conversation that cannot be trained on. The message is the reason."""


@dataclass(frozen=True)
class Forms:
    """The forms of messages that a template renders as intended."""

    roles: tuple[str, ...] = ()
    """The names with which it compares roles."""
    objects: bool = True
    """It renders arguments of tool calls given as objects."""
    texts: bool = False
    """It renders arguments of tool calls given as JSON text."""
    empty: bool = True
    """It renders the tool calls of a message whose content is empty."""
    null: bool = False
    """It accepts null as the content of a message with tool calls."""
    short_ids: bool = False
    """It refuses identities of calls that have not nine letters or digits, as Mistral's does."""
    plain: bool = True
    """It renders content given as text."""
    parts: bool = False
    """It renders content given as a list of parts."""


@dataclass(frozen=True)
class Conversation:
    """A conversation in the form that a template reads."""

    messages: list[Message]
    answers: tuple[int, ...]
    """The indices of the assistant's messages."""
    trained: tuple[int, ...]
    """The indices of those messages that have labels."""
    others: bool
    """Whether a message of somebody else is marked as one to train on."""
    extra: dict[str, Any]
    """Variables of the template: the row's own ones, `tools` and `documents`, if it has them."""
    nulls: bool
    """Whether null was an argument of a call, which is left out."""


def normalized(row: Mapping[str, Any], place: str, forms: Forms) -> Conversation:
    """The conversation of a row.

    Args:
        place: where the row is, for messages.

    Raises:
        Dropped: the conversation cannot be trained on.
        DataError: the row is no conversation.
    """
    if any(row.get(name) for name in MEDIA):
        raise Dropped("images, video or sound")
    if any(str(row.get(name)).strip().lower() in rejects for name, rejects in TAGS.items()) or (
        has_zero_label(row) and {"prompt", "completion"} <= row.keys()
    ):
        raise Dropped("an answer that its label rejects")
    if row.get(KIND) in ATTRIBUTES:
        raise Dropped("attributes of turns")
    try:
        messages = [dict(message) for message in _messages_of(row, place)]
        _spread_marks(messages, row)
        tools = _tools(row, messages)
        if "tools" in messages[0]:
            messages[0]["tools"] = tools
        messages = list(_unfolded(messages))
        nulls = any(_has_null(row.get(name)) for name in MESSAGES)
        documents = _clean(row.get("documents"))
        settings = _clean(row.get(SETTINGS)) or {}
        prompts = (row.get(key) for key in SYSTEMS)
        system = next((text for text in prompts if text and str(text).strip()), "")
    except RecursionError as error:
        raise Dropped("deeply nested messages") from error
    if isinstance(system, list):
        system = _content(_clean(system), SYSTEM, Forms())
    if not isinstance(system, str):
        raise Dropped("a system prompt that is no text")
    if isinstance(settings, str):
        settings = _json(settings, f"{SETTINGS} that is not JSON")
    if not isinstance(settings, dict):
        raise Dropped(f"{SETTINGS} that is no object")
    if system and _role(messages[0]) != SYSTEM:
        messages.insert(0, {"role": SYSTEM, "content": _text(system)})
    converted: list[Message] = []
    answers, trained, results = list[int](), list[int](), list[int]()
    others = False
    waiting: list[str] = []
    for message in messages:
        role, calls = _role(message), _name(message) in CALLS
        counts = _counts(message)
        if role == ASSISTANT:
            _refuse_unknown_marks(message)
        made = _message(message, role, forms, waiting)
        if calls and answers and answers[-1] == len(converted) - 1:  # it calls in the same turn
            if (counts is not False) != (answers[-1] in trained):
                raise Dropped(_PARTLY)
            converted[-1]["tool_calls"] = [*converted[-1].get("tool_calls", ()), *made["tool_calls"]]
            continue
        if role == TOOL:
            results.append(len(converted))
        if role == ASSISTANT:
            answers.append(len(converted))
            if counts is not False:
                trained.append(len(converted))
        else:
            others = others or counts is True
        converted.append(made)
    order_results(converted, results)
    if forms.short_ids:
        _shorten_ids(converted, results)
    if not answers:
        raise Dropped("no assistant message")
    if not trained:
        raise Dropped("no assistant message with a weight")
    extra = settings | {key: value for key, value in (("tools", tools), ("documents", documents)) if value}
    return Conversation(converted, tuple(answers), tuple(trained), others, extra, nulls)


def has_zero_label(row: Mapping[str, Any]) -> bool:
    """Whether the row's label is the number 0."""
    return str(row.get("label")).strip() in ZEROS


def question(text: str, system: str, forms: Forms) -> list[Message]:
    """The user's message `text`, after that of the `system` unless it is empty."""
    messages = [*([(SYSTEM, system)] if system else []), (USER, text)]
    return [_message({"role": role, "content": content}, role, forms, []) for role, content in messages]


def _unfolded(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages, where thoughts and calls that were messages or parts of the content stand beside it, and
    results of tools are messages of their own."""
    thoughts = list[str]()
    for message in messages:
        content = message.get("content")
        if message.get(CHANNEL) == ANALYSIS and isinstance(content, str) and _role(message) == ASSISTANT:
            if _counts(message) is False:
                raise Dropped(_PARTLY)
            thoughts.append(content)
            continue
        if thoughts and _role(message) != ASSISTANT:
            raise Dropped(_UNANSWERED)
        left, calls = list[Any](), list[Any]()
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in (*THOUGHT_PARTS, *CALL_PARTS) and _counts(part) is False:
                raise Dropped(_PARTLY)
            if kind in THOUGHT_PARTS:
                thought = part.get(kind, part.get("value", part.get("text")))
                thoughts.append(_content(thought if isinstance(thought, list) else [thought], USER, Forms()))
            elif kind in CALL_PARTS:
                calls.append(part.get("value", part))
            elif kind == RESULT_PART:
                named = {"tool_call_id": part["tool_use_id"]} if "tool_use_id" in part else {}
                yield {"role": TOOL, "content": part.get("content"), **named}
            else:
                left.append(part)
        if not thoughts and (not isinstance(content, list) or len(left) == len(content)):
            yield message
        elif left or thoughts or calls:
            said = left if isinstance(content, list) else content
            beside = {REASONING[0]: "\n\n".join(thoughts)} if thoughts else {}
            yield {**message, "content": said, **beside, **({"tool_calls": calls} if calls else {})}
        thoughts = []
    if thoughts:
        raise Dropped(_UNANSWERED)


def _spread_marks(messages: list[Message], row: Mapping[str, Any]) -> None:
    """Give each message its mark from the row's list of them. Raises Dropped for a row without labels."""
    marks = {key: value for key in ROW_MARKS if (value := _clean(row.get(key))) not in (None, [], "")}
    lists = {key: value for key, value in marks.items() if isinstance(value, list)}
    masked = _clean(row.get(MASK))
    if isinstance(masked, str) and masked.strip():
        roles = {_ROLE_OF.get(name.strip().lower()) for name in masked.split(",")}
        if USER not in roles or ASSISTANT in roles:
            raise Dropped("a mask of other roles than the user's")
    elif masked not in (None, [], ""):
        raise Dropped(_UNCLEAR_MASK)
    if _counts({key: value for key, value in marks.items() if key not in lists}) is False:
        raise Dropped("a row with a weight of 0")
    for key, values in lists.items():
        if len(values) != len(messages):  # they are for tokens
            raise Dropped(_PARTLY)
        for message, value in zip(messages, values, strict=True):
            message.setdefault(key, value)


def _messages_of(row: Mapping[str, Any], place: str) -> list[Message]:
    columns = [name for name in MESSAGES if name in row]
    for name in columns:
        value = row[name]
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = _json(value, "messages that are not JSON")
        if value is None or value == []:
            continue
        cleaned = _clean(value)
        if isinstance(cleaned, dict) and _is_columns(cleaned):  # as `datasets` stores a Sequence
            cleaned = [dict(zip(cleaned, turn, strict=True)) for turn in zip(*cleaned.values(), strict=True)]
        if isinstance(cleaned, list):
            cleaned = list(_turns([message for message in cleaned if message is not None]))
        if cleaned == []:
            continue
        if not isinstance(cleaned, list) or not all(isinstance(message, dict) for message in cleaned):
            raise DataError(
                f"{place}: {name} is no list of messages, each with a role and a content; {_REPAIR}"
            )
        if _role(cleaned[-1]) != ASSISTANT:
            refuse_preferences((key for key, value in row.items() if value), place)
        return cleaned
    asked, about, answer = (_first(row, names) for names in (QUESTIONS, INPUTS, ANSWERS))
    if not asked:
        asked, about = about, ""
    has_pair = bool(asked and answer)
    if columns and not (has_pair and row[asked] is not None and row[answer] is not None):
        raise Dropped("no messages")
    if has_pair:
        last = _pair(row[asked], row[about] if about else None, row[answer], place)
        return [*_earlier(row.get(HISTORY)), *last]
    refuse_preferences(row, place)
    raise DataError(
        f'{place} holds no conversation: expected "messages" with role and content, "conversations" with '
        'from and value, "instruction" with "output", or "prompt" with "completion", got '
        f"{', '.join(map(str, row))[:200] or 'an empty row'}; {_REPAIR}"
    )


def _turns(given: Sequence[Any]) -> Iterator[Any]:
    """The messages of turns, which may be pairs of a question and its answer (ms-swift's and XTuner's),
    texts of the user and the assistant by turns (LIMA's), or messages as JSON text (of columns whose rows
    have unlike keys)."""
    are_texts = len(given) > 1 and all(isinstance(turn, str) for turn in given)
    if are_texts and all(turn.lstrip().startswith("{") for turn in given):
        with suppress(Dropped):
            messages = [_json(turn, "no messages") for turn in given]
            if all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages):
                given, are_texts = messages, False
    for index, turn in enumerate(given):
        if are_texts:
            yield {"role": (USER, ASSISTANT)[index % 2], "content": turn}
            continue
        if not isinstance(turn, dict) or not {"role", "from"}.isdisjoint(turn):
            yield turn
            continue
        texts = {_PAIRED[key.lower()]: text for key, text in turn.items() if key.lower() in _PAIRED}
        if ASSISTANT not in texts:
            yield turn
            continue
        marks = {key: value for key, value in turn.items() if key in (*TRAINED, *MASKED)}
        for role in (SYSTEM, USER, ASSISTANT):
            if role == ASSISTANT or texts.get(role):
                yield {"role": role, "content": texts[role], **(marks if role == ASSISTANT else {})}


def refuse_preferences(names: Iterable[str], place: str) -> None:
    """Raise DataError if these columns hold two answers to a question, as DPO reads them."""
    if {*PREFERENCES} <= {*names}:
        raise DataError(
            f'{place} holds preferences between two answers ("chosen", "rejected"), which cannot be trained '
            'on here: give the better one as "messages", or as "completion" beside its "prompt"'
        )


def _is_columns(value: Message) -> bool:
    """Whether these are lists of one length."""
    lengths = {len(column) if isinstance(column, list) else -1 for column in value.values()}
    return len(lengths) == 1 and -1 not in lengths


def _first(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of these columns that has a value, or else the first that is present; empty if none is."""
    present = [name for name in names if name in row]
    return next((name for name in present if row[name] is not None), present[0] if present else "")


def _pair(asked: Any, about: Any, answer: Any, place: str) -> list[Message]:
    """A question and its answer as messages. Either may already be a list of messages (TRL's format)."""
    wrong = DataError(f"{place}: a question and its answer must be texts or lists of messages; {_REPAIR}")
    are_lists = isinstance(asked, list), isinstance(answer, list)
    if all(are_lists) or (
        any(are_lists) and not about and isinstance(answer if are_lists[0] else asked, str)
    ):
        prompt = _clean(asked if are_lists[0] else [{"role": USER, "content": asked}])
        completion = _clean(answer if are_lists[1] else [{"role": ASSISTANT, "content": answer}])
        if not all(isinstance(message, dict) for message in (*prompt, *completion)):
            raise wrong
        # The loss is on the completion, as in TRL.
        return [*({**message, "train": False} for message in prompt), *completion]
    if asked is None or answer is None or (isinstance(answer, str) and not answer.strip()):
        raise Dropped("a question without an answer")
    if not (isinstance(asked, str) and isinstance(answer, str) and isinstance(about, str | None)):
        raise wrong
    parts = [_text(part) for part in (asked, about or "") if part.strip()]
    return [
        {"role": USER, "content": "\n\n".join(parts)},
        {"role": ASSISTANT, "content": _text(answer)},
    ]


def _earlier(pairs: Any) -> Iterator[Message]:
    """Earlier questions and their answers as messages. Raises Dropped if they have another form."""
    if isinstance(pairs, str) and pairs.strip():
        pairs = _json(pairs, "a history that is not JSON")
    for pair in _listed(_clean(pairs)):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise Dropped("a history that is no list of questions with answers")
        yield {"role": USER, "content": pair[0]}
        yield {"role": ASSISTANT, "content": pair[1]}


def _role(message: Message) -> str:
    """The template's role for a message, or the role's name unchanged if it is unknown."""
    if not (name := _name(message)):
        raise Dropped("a message without a role")
    return ASSISTANT if name in CALLS else _ROLE_OF.get(name) or str(message.get("role", message.get("from")))


def _name(message: Message) -> str:
    """The name of a message's role in lower case; empty if it has none."""
    given = message.get("role", message.get("from"))
    return given.strip().lower() if isinstance(given, str) else ""


def _counts(message: Message) -> bool | None:
    """Whether a message or a part of one has labels; None if it does not say so. Removes the keys that do."""
    counts: bool | None = None
    for key in (*TRAINED, *MASKED):
        value = message.get(key)
        if isinstance(value, str):
            value = _NUMBERS.get(value.strip().lower(), value)
        if value in (0, 1):
            del message[key]
            if bool(value) != (key in TRAINED):
                counts = False
            elif key in TRAINED and counts is None:
                counts = True
        elif isinstance(value, list) and value:
            raise Dropped(_PARTLY)
        elif key != MEASURED and value not in (None, [], ""):
            raise Dropped("a weight other than 0 and 1")
    if message.get(DETAIL):
        raise Dropped(_PARTLY)
    if message.get(MASK) in (0, 1):
        raise Dropped(_UNCLEAR_MASK)
    return counts


def _refuse_unknown_marks(message: Message) -> None:
    """Raise Dropped if a key with another name says that the message has no labels."""
    for key, value in message.items():
        if type(value) is bool and _MARK.search(name := key.lower()) and value is bool(_MASKS.search(name)):
            raise Dropped(f"a mark of training with the unknown name {key[:40]}")


def _message(message: Message, role: str, forms: Forms, waiting: list[str]) -> Message:
    """Convert a message.

    Args:
        waiting: the ids that this module gave to calls which have no answer yet.
    """
    given = str(message.pop("role", message.pop("from", "")))
    contents = [text for key in CONTENTS if (text := message.pop(key, None)) is not None]
    # Some have several, all but one of them empty.
    content = next((text for text in contents if text != ""), contents[0] if contents else None)
    calls = message.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = _json(calls, "tool calls that are not JSON") if calls.strip() else None
    calls = list(_listed(calls))
    legacy = message.pop("function_call", None)
    if given.strip().lower() in CALLS:
        legacy, content = content, None
    if legacy and not calls:
        calls = list(_legacy_calls(legacy, waiting))
    if role == TOOL and waiting:
        message.setdefault("tool_call_id", waiting.pop(0))
    thoughts = {key: message[key] for key in REASONING if key in message}
    if role == ASSISTANT and not all(isinstance(text, str) for text in thoughts.values()):
        raise Dropped("reasoning that is no text")
    thoughts = {key: _untagged(text) for key, text in thoughts.items() if isinstance(text, str)}
    thoughts = {key: text for key, text in thoughts.items() if text.strip()}
    reasoning = next(iter(thoughts.values()), "")
    if reasoning:  # it may stand beside an empty one
        message = {**message, "thinking": reasoning, **thoughts, "reasoning_content": reasoning}
    written = _content(content, role, forms)
    if role == ASSISTANT and not (calls or reasoning or words_of(written).strip()):
        raise Dropped("an answer without content")
    if content is None and role == USER:
        raise Dropped("a question without content")
    converted: Message = {"role": _written_role(given, role, forms), "content": written}
    if calls:
        if not (forms.objects or forms.texts):
            raise Dropped(LEFT_OUT)
        converted["tool_calls"] = [_call(call, forms) for call in calls]
        if forms.null and (content is None or not (forms.empty or converted["content"])):
            converted["content"] = None
    return {**converted, **message}


def _untagged(thought: str) -> str:
    """A thought without the tags that templates write around it."""
    inner = thought.strip()
    tagged = inner.startswith(THOUGHT) and inner.endswith(THOUGHT_END)
    return inner.removeprefix(THOUGHT).removesuffix(THOUGHT_END).strip() if tagged else thought


def _written_role(given: str, role: str, forms: Forms) -> str:
    """The name of the role that the template knows."""
    names = ROLES.get(role, ())
    if given in forms.roles or not names:
        return given
    return next((name for name in (role, *names) if name in forms.roles), role)


def _content(content: Any, role: str, forms: Forms) -> Any:
    if isinstance(content, str) and role != TOOL and _PARTS.match(content):
        with suppress(ValueError, RecursionError):
            parts = json.loads(content)
            if all(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in parts):
                content = _texts(parts)
    if isinstance(content, dict) and role != TOOL:
        content = [content]
    if isinstance(content, list) and (role != TOOL or all(map(_is_part, content))):
        parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in content]
        if role == ASSISTANT and any(_counts(part) is False for part in parts):
            raise Dropped(_PARTLY)
        texts = [part.get("text", part.get("value", "")) for part in parts if _is_text(part)]
        if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
            raise Dropped("content other than text")
        if forms.parts and all(part.get("type") == "text" and "text" in part for part in parts):
            return parts
        content = "".join(map(str, texts))
    elif content is not None and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    if content is not None and forms.parts and not forms.plain:
        return [{"type": "text", "text": content}]
    return content or ""


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and ("type" in value or "text" in value)


def _is_text(part: Message) -> bool:
    # Arrow may have added a part without anything. It counts as empty text.
    if part.get("type", "text") not in TEXT_PARTS:
        return False
    return "text" in part or "value" in part or part.keys() <= {"type"}


def _call(call: Any, forms: Forms) -> Message:
    """A tool call in OpenAI's form, whose arguments the template can render."""
    if isinstance(call, str):
        call = _json(call, "tool calls that are not JSON")
    if not isinstance(call, dict):
        raise Dropped("tool calls that are no objects")
    inner = call.get("function", call)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise Dropped("tool calls without a name")
    key = _arguments_key(inner)
    inner = {"arguments" if name == key else name: value for name, value in inner.items()}
    arguments = inner.get("arguments")
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str) and forms.objects and not (forms.texts and arguments.strip()):
        arguments = _json(arguments, "arguments that are not JSON") if arguments.strip() else {}
        if isinstance(arguments, str):  # encoded as JSON twice
            arguments = _json(arguments, "arguments that are not JSON")
        arguments = {} if arguments is None else arguments  # of calls without any, as some servers write it
    if not isinstance(arguments, dict | str):
        raise Dropped("arguments that are no object")
    if not isinstance(arguments, str) and not forms.objects:
        arguments = json.dumps(arguments, ensure_ascii=False)
    changed = {**inner, "arguments": arguments}
    if "function" in call:
        return {"type": "function", **call, "function": changed}
    beside = {"id": changed.pop("id")} if "id" in changed else {}
    changed.pop("type", None)
    return {**beside, "type": "function", "function": changed}


def _legacy_calls(legacy: Any, waiting: list[str]) -> Iterator[Message]:
    """Calls of `function_call`, either a message's or a role's, with the ids of nine characters that some
    templates require."""
    if isinstance(legacy, str):
        legacy = _json(legacy, "a function call that is not JSON")
    for call in legacy if isinstance(legacy, list) else [legacy]:
        inner = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise Dropped("tool calls without a name")
        arguments = inner.get(_arguments_key(inner), {})
        waiting.append(f"call{len(waiting):05}")
        function = {"name": inner["name"], "arguments": arguments}
        yield {"id": waiting[-1], "type": "function", "function": function}


def words_of(content: str | Sequence[Message] | None) -> str:
    """The text of a message's content, which may be in parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def thoughts_of(message: Message) -> list[str]:
    """The thoughts of a message, which stand in its content or beside it."""
    said = words_of(message.get("content")).rpartition(THOUGHT_END)[0].rpartition(THOUGHT)[2]
    return [text.strip() for text in (said, str(message.get(REASONING[0]) or "")) if text.strip()]


def _arguments_key(call: Message) -> str:
    """The key that holds a call's arguments, if it has any."""
    return next((key for key in ARGUMENTS if key in call), ARGUMENTS[0])


def order_results(messages: list[Message], results: Sequence[int]) -> None:
    """Put the results that follow several calls, which are the messages of these indices, in the order of the
    calls. Most templates write no ids, so that a result answers the call at its place."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            continue
        places = {str(call["id"]): place for place, call in enumerate(calls) if "id" in call}
        start = stop = index + 1
        while stop in results:
            stop += 1
        names = [str(result.get("tool_call_id")) for result in messages[start:stop]]
        if places.keys() >= set(names):
            messages[start:stop] = sorted(
                messages[start:stop], key=lambda result: places[str(result.get("tool_call_id"))]
            )


def _shorten_ids(messages: Sequence[Message], results: Sequence[int]) -> None:
    """Number the calls, and let their results, which are the messages of these indices, follow."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    given = [call.get("id") for call in calls]
    given += [messages[index].get("tool_call_id") for index in results]
    if all(isinstance(name, str) and _SHORT_ID.fullmatch(name) for name in given):
        return
    names = [f"call{number:05}" for number in range(len(calls))]
    calling, answering = iter(names), iter(names)  # without identities results come in the order of calls
    known: dict[str, str] = {}  # an identity may be used again
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            name = next(calling)
            if "id" in call:
                known[str(call["id"])] = name
            call["id"] = name
        if index in results and (name := next(answering, "")):
            message["tool_call_id"] = known.get(str(message.get("tool_call_id", "")), name)


def tools_of(row: Mapping[str, Any], place: str) -> list[Any]:
    """The tools of a row. Raises Dropped, and DataError if the row is no conversation."""
    try:
        return _tools(row, _messages_of(row, place))
    except RecursionError as error:
        raise Dropped("deeply nested messages") from error


def _tools(row: Mapping[str, Any], messages: Sequence[Message]) -> list[Any]:
    """The tools as a list of objects. Any of them may be given as JSON text."""
    # GLM-4's and OLMo 3's data have them in the system message.
    given = (_from_json(holder.get(key)) for holder in (row, messages[0]) for key in TOOLS)
    return [_tool(tool) for tool in _listed(next(filter(None, given), None))]


def _from_json(tools: Any) -> Any:
    tools = _clean(tools)
    if isinstance(tools, str):
        return _json(tools, "tools that are not JSON") if tools.strip() else None
    return tools


def _tool(given: Any) -> Message:
    """A tool in OpenAI's form, in which servers give it to templates. Some read no other."""
    tool = _tool_object(given)
    if isinstance(tool.get("function"), dict | str):
        inner = _tool_object(tool["function"])
    elif "name" in tool and tool.get("type", "function") in ("function", "custom"):
        inner = {key: value for key, value in tool.items() if key != "type"}
        tool = {"type": "function"}
    else:
        return tool
    if "parameters" not in inner:
        inner = {"parameters" if key == SCHEMA else key: value for key, value in inner.items()}
    if isinstance(inner.get("parameters"), str):
        inner = {**inner, "parameters": _json(inner["parameters"], "tools that are not JSON")}
    return {**tool, "function": inner}


def _tool_object(tool: Any) -> Message:
    found = _json(tool, "tools that are not JSON") if isinstance(tool, str) else tool
    if not isinstance(found, dict):
        raise Dropped("tools that are no objects")
    return found


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value] if value else []


def _json(text: str, reason: str) -> Any:
    try:
        return _texts(json.loads(text, parse_float=_finite, parse_constant=_finite))
    except (ValueError, RecursionError) as error:
        raise Dropped(reason) from error


def _finite(number: str) -> float:
    """Python's JSON accepts NaN and infinities. They are refused, because they would be written again and are
    not JSON."""
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no number")
    return value


def _clean(value: Any) -> Any:
    """The value without the keys that Arrow filled with None, or pandas with NaN, and with valid UTF-8
    text."""
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items() if item is not None and item == item}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return _texts(value)


def _has_null(value: Any, *, inside: bool = False) -> bool:
    """Whether null stands `inside` the arguments of a call."""
    if isinstance(value, dict):
        return any(
            (inside and item is None) or _has_null(item, inside=inside or key in ARGUMENTS)
            for key, item in value.items()
        )
    return isinstance(value, list) and any(_has_null(item, inside=inside) for item in value)


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_text(key): _texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_texts(item) for item in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, date | time | timedelta):
        return str(value)  # as a template writes it
    if isinstance(value, Decimal) and value.is_finite():
        return float(value)
    if isinstance(value, bytes):  # some writers of Parquet do not declare text as text
        with suppress(UnicodeDecodeError):
            return _text(value.decode())
    raise Dropped("values that JSON cannot hold")


def _text(text: str) -> str:
    """The text with unpaired surrogates replaced, and without byte order marks at the beginning of lines."""
    if text.isascii():
        return text
    return without_marks(utf8(text)).decode()
