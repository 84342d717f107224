"""Renders chat templates in a separate process, because templates come with models from unknown sources.

A template is a program. The sandbox keeps it away from files and from Python's internals, and the process
limits its time and memory: the system ends it after `LIMIT_SECONDS` of computing for a conversation, or
`MEAN_SECONDS` on average for each of many, and limits its memory to `LIMIT_BYTES`. `ChatTemplate` starts the
process and sends it requests, one line of JSON each. `Template` answers there.

The assistant's text is what the template marks with `{% generation %}`. A template without such marks is
rendered up to each message: the assistant's text is what its message adds to the prompt. If a template
changes earlier messages once later ones follow, it is rendered once more with a private character at both
ends of each message. These characters show where a message lies in the whole rendering.
"""

import json
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from node import program
from node.data.conversations import (
    ASSISTANT,
    LEFT_OUT,
    SYSTEM,
    THOUGHT,
    THOUGHT_END,
    TOOL,
    USER,
    Conversation,
    Dropped,
    Forms,
    Message,
    thoughts_of,
)
from wire.errors import DataError

LIMIT_SECONDS = 10.0
"""The most seconds of computing for one conversation. Usually it takes less than a thousandth of it."""
MEAN_SECONDS = 1.0
"""The most seconds of computing for each of many conversations, on average."""
LIMIT_BYTES = 2 << 30
SURE_CHARACTERS, MOST_EXPANSION = 256 << 10, 100
"""The most characters of a rendered conversation, or as a multiple of those that went into it."""
_MARKS = re.compile("[\U000f0000-\U000ffffd]")
"""Unicode's private characters, which mark where messages are."""
_MOST_MESSAGES = 0x7FFF
"""Each message needs two marks."""
_ENDED = re.compile(r"(<[^<>\s]+>)\s*<[^<>\s]+>")
"""A special token after an answer, before the one that begins the next message."""
_LOST = "an answer lost where the template rewrites earlier messages"

Span = tuple[int, int]
"""The start and the end of a span, in characters."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans that the assistant wrote."""

    text: str
    assistant: tuple[Span, ...]


class TemplateError(Exception):
    """Raised for a template that cannot be used for any conversation. The message is the reason."""


class ChatTemplate:
    """A template in a separate process. It may be used from any thread."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """
        Args:
            tokens: `bos_token`, `eos_token` and the like, to which templates refer.
            where: the template's place, for messages.

            Raises:
                DataError: the template cannot be read, or does not end.
        """
        try:
            import jinja2
        except ImportError as error:
            raise DataError('chat data needs the jinja2 package: pip install "thinwire[data]"') from error
        self.version = jinja2.__version__
        self._where = where
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [*program("data.templates"), str(LIMIT_SECONDS), str(MEAN_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        weakref.finalize(self, _end, self._process)
        answer = self._ask({"source": source, "tokens": dict(tokens)})
        self.forms = Forms(**{**answer["forms"], "roles": tuple(answer["forms"]["roles"])})
        self.turn_end: str = answer["turn_end"]
        """What the template writes after an answer."""

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation as text, with the assistant's spans. Raises Dropped and DataError."""
        (result,) = self.render_all([conversation])
        if isinstance(result, Dropped):
            raise result
        return result

    def render_all(self, conversations: Sequence[Conversation]) -> list[Rendered | Dropped]:
        """`render` for several conversations in one message, because waking the process takes longer than
        rendering. Raises DataError."""
        try:
            answer = self._ask({"conversations": [vars(conversation) for conversation in conversations]})
        except Dropped as reason:  # one of them is nested too deeply
            if len(conversations) == 1:
                return [reason]
            return [result for conversation in conversations for result in self.render_all([conversation])]
        return [
            Dropped(row["dropped"])
            if "dropped" in row
            else Rendered(row["text"], tuple((start, stop) for start, stop in row["spans"]))
            for row in answer["answers"]
        ]

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation up to the beginning of the assistant's next message. Raises Dropped and
        DataError."""
        return str(self._ask({"prompt": list(messages)})["text"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            line = json.dumps(question).encode() + b"\n"
        except RecursionError as error:
            raise Dropped("deeply nested messages") from error
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes"
        try:
            with self._lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            answer = b""
        reply: dict[str, Any] = json.loads(answer) if answer.endswith(b"\n") else {"error": self._ending()}
        if "dropped" in reply:
            raise Dropped(reply["dropped"])
        if "error" in reply:
            raise DataError(f"the chat template in {self._where} {reply['error']}")
        return reply

    def _ending(self) -> str:
        if self._process.wait() == -signal.SIGPROF:
            each = f"{MEAN_SECONDS:g} s for each of many"
            return f"takes more than {LIMIT_SECONDS:g} s for a conversation, or {each}"
        return "ended the process that renders it"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Template:
    """A compiled template, in the separate process."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
        from jinja2 import nodes

        self._tokens = dict(tokens)
        self._spans: list[tuple[int, str]] = []
        self._blocks: list[str] = []
        self.marked = False
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[self._generation_tag(), "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
            compared = list(environment.parse(source).find_all(nodes.Compare))
        except jinja2.TemplateError as error:
            raise TemplateError(f"cannot be read: {_line(error)}") from error
        except RecursionError as error:
            raise TemplateError("is nested too deeply") from error
        words = [_words(comparison) for comparison in compared]
        # Other comparisons have some of the same words: a tool's type is "function".
        of_roles = [several for several in words if any("role" in word for word in several)] or words
        self._roles = tuple(dict.fromkeys(word for several in of_roles for word in several))
        self.forms, self.turn_end = self._probe()

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation as text, with the spans of the messages that have labels.

        Raises:
            Dropped: the conversation cannot be rendered, or an answer's span is unknown.
            TemplateError: the template cannot be used at all.
        """
        text = self._text(conversation.messages, conversation.extra)
        spans = self._generated(conversation, text) if self.marked else self._answers(conversation, text)
        called = Counter(name for index in conversation.trained for name in _called(conversation, index))
        written = "".join(text[start:stop] for start, stop in spans)
        if any(written.count(name) < count for name, count in called.items()):
            raise Dropped(LEFT_OUT)
        return Rendered(text, tuple(spans))

    def _answers(self, conversation: Conversation, text: str) -> list[Span]:
        """The spans of the answers in a rendering without marks of the template's own. Raises as `render`."""
        messages, extra = conversation.messages, conversation.extra
        whole: _Marked | None = None
        spans = []
        for index in conversation.trained:
            # For a first message, nothing separates what the template writes before it from the message
            # itself.
            before = self._try(messages[:index], extra, prompt=True) if index else None
            after = self._try(messages[: index + 1], extra) if before is not None else None
            if (
                after is not None
                and before is not None
                and text.startswith(after)
                and after.startswith(before)
            ):
                spans.append((len(before), len(after)))
                continue
            whole = whole or self._mark(conversation, len(messages))
            if whole.text != text:
                raise Dropped(_LOST)
            spans.append(self._found(conversation, whole, index))
        return spans

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation up to the beginning of the assistant's next message. Raises Dropped and
        TemplateError."""
        return self._text(messages, {}, prompt=True)

    def _generated(self, conversation: Conversation, text: str) -> list[Span]:
        """The spans that the template marks, without those of answers that have no labels."""
        if any(not text.startswith(part, start) for start, part in self._spans):
            raise Dropped("generation marks within a macro")
        spans = [(start, start + len(part)) for start, part in self._spans]
        if conversation.trained == conversation.answers:
            return spans
        if len(spans) != len(conversation.answers):
            raise Dropped("weights where generation marks are not one an answer")
        numbered = zip(conversation.answers, spans, strict=True)
        return [span for index, span in numbered if index in conversation.trained]

    def _text(self, messages: Sequence[Message], extra: Mapping[str, Any], *, prompt: bool = False) -> str:
        self._spans.clear()
        self._blocks.clear()
        values = {**self._tokens, "tools": None, "documents": None, **extra}
        values.update(messages=list(messages), add_generation_prompt=prompt)
        size, most = 0, SURE_CHARACTERS
        try:
            for block in self._template.generate(values):
                self._blocks.append(block)
                size += len(block)
                if size > most:
                    most = max(most, MOST_EXPANSION * len(str((messages, extra))))
                if size > most:
                    raise TemplateError(f"writes more than {most:,} characters for a conversation")
        except (TemplateError, MemoryError):
            raise
        except RecursionError as error:
            raise TemplateError("calls itself without end") from error
        except Exception as error:  # a template is a program, and may fail in any way
            raise Dropped(f"the template refuses it: {_line(error)}") from error
        return "".join(self._blocks)

    def _try(
        self, messages: Sequence[Message], extra: Mapping[str, Any], *, prompt: bool = False
    ) -> str | None:
        try:
            return self._text(messages, extra, prompt=prompt)
        except Dropped:
            return None

    def _mark(self, conversation: Conversation, count: int, *, prompt: bool = False) -> "_Marked":
        """A rendering of the first `count` messages with marks. Raises Dropped."""
        if count > _MOST_MESSAGES:
            raise Dropped("too many messages")
        marked = [
            _with_marks(message, index, answer=index in conversation.answers)
            for index, message in enumerate(conversation.messages[:count])
        ]
        return _Marked.of(self._text(marked, conversation.extra, prompt=prompt))

    def _found(self, conversation: Conversation, whole: "_Marked", index: int) -> Span:
        """The span of an answer in a rendering that does not begin like the rendering up to it.

        The text between the answer and its neighbours is taken from the renderings up to the answer and with
        it. The whole rendering must have the same text there. Raises Dropped.
        """
        begin, end = map(chr, _marks_of(index))
        last = whole.places.get(end)
        if last is None:
            raise Dropped(_LOST)
        first = whole.places.get(begin)
        anchor = last if first is None else first
        others = {place: mark for mark, place in whole.places.items() if mark not in (begin, end)}
        floor = max((place for place in others if place <= anchor), default=0)
        ceiling = min((place for place in others if place > last), default=len(whole.text))

        start = first
        header = self._tail(conversation, index, others.get(floor, ""), prompt=True)
        if header is not None and whole.text.startswith(header, floor):
            start = floor + len(header)
        else:
            asked = self._try(conversation.messages, conversation.extra, prompt=True) or ""
            opening = asked[len(whole.text) :] if asked.startswith(whole.text) else ""
            place = whole.text.rfind(opening, floor, anchor) if opening else -1
            if place >= 0:
                start = place + len(opening)
            elif header is not None and first is not None:
                # The prompt may begin a thought, or say that there are none.
                shared = _shared(whole.text[floor:first], header)
                floor += shared
                start = _thought_start(whole.text, floor, first, conversation.messages[index])
                thinks = header[:shared].endswith(THOUGHT) or header.startswith(THOUGHT, shared)
                start = floor if start == first and thinks else start
        if start is None or start > anchor:
            raise Dropped(_LOST)

        closing = self._tail(conversation, index + 1, end)
        closing = self.turn_end if closing is None else closing
        behind = whole.text[last:ceiling]
        shared = _shared(behind, closing)
        if not behind[:shared].strip() and closing.lstrip().startswith("<"):
            # The last answer may end with another token, as gpt-oss's does.
            ended = _ENDED.match(behind, shared)
            shared = ended.end(1) if ended else shared
        stop = last + shared
        if closing and stop == last:
            raise Dropped(_LOST)
        return start, stop

    def _tail(self, conversation: Conversation, count: int, mark: str, *, prompt: bool = False) -> str | None:
        """What follows the mark when only the first messages are rendered; None if it is not the last
        mark."""
        if not count or not mark:
            return None
        try:
            marked = self._mark(conversation, count, prompt=prompt)
        except Dropped:
            return None
        return marked.tail if marked.last == mark else None

    def _probe(self) -> tuple[Forms, str]:
        """Find out which forms of messages the template renders correctly, and what it writes after an
        answer."""
        asked = {"role": USER, "content": "probe0"}
        system = {"role": SYSTEM, "content": "probe1"}
        tool = {"type": "function", "function": {"name": "probe3", "description": "", "parameters": {}}}

        def answer(content: Any, **more: Any) -> Message:
            return {"role": ASSISTANT, "content": content, **more}

        def written(*messages: Message, **extra: Any) -> str | None:
            text = self._try([asked, *messages], extra)
            return self._try([system, asked, *messages], extra) if text is None else text

        def call(
            arguments: Any, content: str | None, name: str = "call00000", *, answered: bool = False
        ) -> str | None:
            function = {"name": "probe3", "arguments": arguments}
            message = answer(content, tool_calls=[{"id": name, "type": "function", "function": function}])
            result = {"role": TOOL, "name": "probe3", "tool_call_id": name, "content": "7"}
            text = None if answered else written(message, tools=[tool])
            return written(message, result, answer("probe2"), tools=[tool]) if text is None else text

        shapes = [(given, c) for given in ({"probe4": "probe5"}, '{"probe4": "probe5"}') for c in ("", None)]
        rendered = [call(*shape) for shape in shapes]
        objects, texts = rendered[:2], rendered[2:]
        as_object = [text is not None and "probe4" in text and "'probe4'" not in text for text in objects]
        as_text = [text is not None and '"probe4"' in text for text in texts]
        works = [shape for shape, good in zip(shapes, (*as_object, *as_text), strict=True) if good]
        empty, null = objects if any(as_object) else texts
        # Null may be refused only where something follows.
        lasts = {content for given, content in works if call(given, content, answered=True) is not None}
        plain = written(answer("probe2")) or ""
        parts = written(answer([{"type": "text", "text": "probe2"}])) or ""
        forms = Forms(
            roles=self._roles,
            # A form that is refused here may work with other messages.
            objects=any(as_object) or all(text is None for text in (*objects, *texts)),
            texts=any(as_text),
            empty=as_object[0] or as_text[0],
            null=(as_object[1] or as_text[1])
            and (null or "").count("None") == (empty or "").count("None")
            and lasts != {""},
            short_ids=bool(works) and call(*works[0], "call_probe6") is None,
            plain="probe2" in plain or "probe2" not in parts,
            parts="probe2" in parts and "'text'" not in parts and '"text"' not in parts,
        )
        shown = plain if "probe2" in plain else parts
        return forms, shown.rpartition("probe2")[2] if "probe2" in shown else ""

    def _generation_tag(self) -> Any:
        """A Jinja extension for `{% generation %}` that records the position and text of each such block.

        The template is rendered block by block, so that a block's position is known.
        """
        from jinja2 import nodes
        from jinja2.ext import Extension

        template = self

        class GenerationTag(Extension):
            tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

            def parse(self, parser: Any) -> Any:
                template.marked = True
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_span"), [], [], body).set_lineno(line)

            def _span(self, caller: Callable[[], str]) -> str:
                text = str(caller())
                template._spans.append((sum(map(len, template._blocks)), text))
                return text

        return GenerationTag


@dataclass(frozen=True)
class _Marked:
    """A rendering of marked messages."""

    text: str
    """The rendering without the marks."""
    places: dict[str, int]
    """The first position of each mark in the text. A tool's result may repeat a call's name and marks."""
    last: str
    """The last mark; empty without marks."""
    tail: str
    """The text after the last mark."""

    @classmethod
    def of(cls, rendered: str) -> "_Marked":
        pieces: list[str] = []
        places: dict[str, int] = {}
        start = size = 0
        last = ""
        for match in _MARKS.finditer(rendered):
            pieces.append(rendered[start : match.start()])
            size += len(pieces[-1])
            start = match.end()
            last = match.group()
            places.setdefault(last, size)
        tail = rendered[start:]
        return cls("".join([*pieces, tail]), places, last, tail)


def _marks_of(index: int) -> tuple[int, int]:
    return 0xF0000 + 2 * index, 0xF0001 + 2 * index


def _with_marks(message: Message, index: int, *, answer: bool) -> Message:
    """The message with marks around the assistant's text, or with one mark inside others' text.

    Marks are inside the surrounding white space, which templates trim. They are not at the edges of others'
    texts, which templates compare.
    """
    begin, end = map(chr, _marks_of(index))
    if _MARKS.search(json.dumps(message, ensure_ascii=False)):
        raise Dropped("private characters where the template rewrites messages")
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    calls = message.get("tool_calls", []) if answer else []
    # Templates remove thoughts, so marks go after them.
    answers = [text.rpartition(THOUGHT_END)[2] if calls else text for text in texts]
    spoken = [at for at, text in enumerate(answers) if text.strip()]
    if spoken and not answer:
        text = texts[spoken[0]]
        middle = len(text) - len(text.lstrip()) + len(text.strip()) // 2
        texts[spoken[0]] = text[:middle] + begin + text[middle:]
    elif spoken:
        text = texts[spoken[0]].rpartition(THOUGHT_END)[2]
        text = text if text.strip() else texts[spoken[0]]
        before = texts[spoken[0]].removesuffix(text) + text[: len(text) - len(text.lstrip())]
        texts[spoken[0]] = before + begin + text.lstrip()
        if not calls:
            text = texts[spoken[-1]]
            texts[spoken[-1]] = text.rstrip() + end + text[len(text.rstrip()) :]
    marked = dict(message)
    if calls:
        named = [_renamed(call, "", end if call is calls[-1] else "") for call in calls]
        marked["tool_calls"] = named if spoken else [_renamed(named[0], begin, ""), *named[1:]]
    if isinstance(content, str):
        marked["content"] = texts[0]
    elif content:
        marked["content"] = [{**part, "text": text} for part, text in zip(content, texts, strict=True)]
    return marked


def _thought_start(text: str, floor: int, first: int, message: Message) -> int:
    """Where the thought of an answer begins in this part of the text, whose words begin at `first`; `first`
    if it is not there."""
    for thought in thoughts_of(message):
        place = text.rfind(thought, floor, first)
        if place >= 0:
            before = text[:place].rstrip()
            return len(before.removesuffix(THOUGHT)) if before.endswith(THOUGHT) else place
    return first


def _words(comparison: Any) -> list[str]:
    """The names, the attributes and the texts of a comparison."""
    from jinja2 import nodes

    words = [node.attr for node in comparison.find_all(nodes.Getattr)]
    words += [node.name for node in comparison.find_all(nodes.Name)]
    constants = (node.value for node in comparison.find_all(nodes.Const))
    return [*(value for value in constants if isinstance(value, str)), *words]


def _called(conversation: Conversation, index: int) -> Iterator[str]:
    """The last word of the name in each of a message's tool calls."""
    for call in conversation.messages[index].get("tool_calls", ()):
        yield from re.findall(r"\w+", call["function"]["name"])[-1:]


def _renamed(call: Message, before: str, after: str) -> Message:
    """A tool call with text added before and after its name."""
    inner = call["function"]
    return {**call, "function": {**inner, "name": f"{before}{inner['name']}{after}"}}


def _shared(text: str, tail: str) -> int:
    """The number of characters with which both begin, not counting an incomplete token where they differ."""
    length = next(
        (at for at, (ours, theirs) in enumerate(zip(text, tail, strict=False)) if ours != theirs), None
    )
    if length is None:
        length = min(len(text), len(tail))
    return length if length == len(tail) else len(text[:length].rstrip("<|["))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` of transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> str:
    raise ValueError(message)


def _now(form: str) -> str:
    """A fixed day, because a run's tokens must not depend on when they are made."""
    return datetime(2025, 1, 1).strftime(form)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__


def _answers(lines: Iterator[bytes], begin: Callable[[], object]) -> Iterator[dict[str, Any]]:
    """The process's answers: to the first line, which has the template, and to the following requests.

    Args:
        begin: called before each conversation.
    """
    template: Template | None = None
    for line in lines:
        try:
            given = json.loads(line)
            begin()
            if template is None:
                template = Template(given["source"], given["tokens"])
                yield {"forms": asdict(template.forms), "turn_end": template.turn_end}
            elif "prompt" in given:
                yield {"text": template.prompt(given["prompt"])}
            else:
                yield {
                    "answers": [
                        _rendered(template, conversation, begin) for conversation in given["conversations"]
                    ]
                }
        except Dropped as reason:
            yield {"dropped": str(reason)}
        except TemplateError as error:
            yield {"error": str(error)}
        except RecursionError:
            yield {"dropped": "deeply nested messages"}
        except MemoryError:
            yield {"error": f"takes more than {LIMIT_BYTES >> 30} GiB for a conversation"}


def _rendered(template: Template, given: dict[str, Any], begin: Callable[[], object]) -> dict[str, Any]:
    begin()
    given.update(answers=tuple(given["answers"]), trained=tuple(given["trained"]))
    try:
        rendered = template.render(Conversation(**given))
    except Dropped as reason:
        return {"dropped": str(reason)}
    except RecursionError:
        return {"dropped": "deeply nested messages"}
    return {"text": rendered.text, "spans": rendered.assistant}


def main(seconds: float, mean: float) -> None:
    """Answer requests until the parent closes the pipe."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    # This timer counts only while the process computes.
    signal.setitimer(signal.ITIMER_PROF, seconds)

    def begin() -> None:
        left, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, min(seconds, left + mean))

    for answer in _answers(iter(sys.stdin.buffer), begin):
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
