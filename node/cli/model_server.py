"""Transformers' server, with answers in one line to requests that it does not carry out as asked.

    python -m node.cli.model_server serve MODEL ...

takes transformers' command line. Without these checks that server ignores some fields in silence, answers
others with an internal error, and computes until it is killed if a client asks for a billion tokens.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from http import HTTPStatus
from typing import Any

from node.dashboard.operator import host_name, is_loopback
from node.data.conversations import REASONING, SYSTEM, TOOL, order_results
from wire.errors import UserError, shortened

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

IGNORED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}},),
    "background": (False,),
    "tool_choice": ("auto",),
    **dict.fromkeys(
        (
            *("functions", "function_call", "audio", "web_search_options"),
            *("previous_response_id", "conversation"),
        ),
        (),
    ),
}
"""Fields that the server ignores or does not carry out as OpenAI does, with the values that ask for nothing
else than it does."""
NUMBERS: Mapping[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, 10**9),
    "max_completion_tokens": (int, 1, 10**9),
    "max_output_tokens": (int, 1, 10**9),
    "seed": (int, 0, 2**63 - 1),
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "frequency_penalty": (float, -0.9, 2),
}
"""The type and the bounds of fields."""
MESSAGES = 'messages must be a list of at least one {"role": "user", "content": "..."}'
MOST_BYTES = 1 << 24
"""The largest request."""
BODY = "http.response.body"
END_OF_STREAM = b"data: [DONE]\n\n"
"""What OpenAI sends at the end of a stream of completions. Some clients wait for it."""
CLIENT: ContextVar[asyncio.Future[Any]] = ContextVar("CLIENT")
"""Done when the client of the current request is gone."""


def served(body: dict[str, Any], path: str) -> dict[str, Any]:
    """A request to `path` as the server carries it out. Raises UserError if it would do something else."""
    body = {name: value for name, value in body.items() if value is not None}
    for name, same in IGNORED.items():
        value = body.get(name)
        if value is not None and (type(value), value) not in [(type(other), other) for other in same]:
            raise UserError(f"{name} is not supported here: leave it out")
    for name, (kind, least, most) in NUMBERS.items():
        value = body.get(name, least)
        if type(value) not in (int, kind) or not least <= value <= most:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"{name} must be {wanted} from {least} to {most:,}, got {shortened(repr(value))}")
    for name in ("stop", "logit_bias"):
        if not body.get(name, True):
            del body[name]  # an empty one is an internal error
    if isinstance(biases := body.get("logit_bias"), dict):
        body["logit_bias"] = {token: 1.0 * bias for token, bias in biases.items()}  # whole numbers fail
    if path.endswith("/chat/completions"):
        messages = body.get("messages")
        body["messages"] = [_message(each) for each in (messages if isinstance(messages, list) else ())]
        if not body["messages"]:
            raise UserError(MESSAGES)
        results = [at for at, message in enumerate(body["messages"]) if message["role"] == TOOL]
        order_results(body["messages"], results)
    elif isinstance(items := body.get("input"), list):
        body["input"] = [_item(item) if isinstance(item, dict) else item for item in items]
    if path.endswith("/responses"):
        body.setdefault("stream", False)
    if isinstance(prompt := body.get("prompt"), list) and len(prompt) == 1:
        (body["prompt"],) = prompt
    return body


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(MESSAGES)
    content = message.get("content") or ""
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"a message's content must be text, got {shortened(repr(part))}")
    message = {name: value for name, value in message.items() if value is not None}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return _as_trained(message)


def _call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object, as JSON or as such. A call without any has an empty text."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        arguments = function.get("arguments") or "{}"
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict):
                return {**call, "function": {**function, "arguments": arguments}}
    wanted = '{"type": "function", "function": {"name": "...", "arguments": "{...}"}}'
    raise UserError(f"a tool call must be {wanted}, got {shortened(repr(call))}")


def _item(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input of `/v1/responses`: a message, a call or a call's result."""
    if item.get("type") == "function_call":
        return {**item, "arguments": item.get("arguments") or "{}"}
    return _as_trained(item)


def _as_trained(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the role under which templates read it, and under which the model was trained."""
    return {**message, "role": SYSTEM} if message.get("role") == "developer" else message


def bounded(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `generate` that ends at the model's last position, and samples if there is a temperature."""

    @wraps(generate)
    def within(model: Any, **given: Any) -> Any:
        length, config = given["input_ids"].shape[-1], given["generation_config"]
        positions = model.config.get_text_config().max_position_embeddings
        if not 0 < length < positions:
            raise UserError(f"the prompt has {length} tokens; it must have 1 to {positions - 1}")
        config.max_new_tokens = min(config.max_new_tokens or positions, positions - length)
        if config.do_sample is None:
            config.do_sample = config.temperature is not None or config.top_p is not None
        return generate(model, **given)

    return within


def until_client_leaves(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A manager's `generate_non_streaming` that ends when the client of the request is gone."""

    @wraps(generate)
    async def within(manager: Any, model: Any, processor: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        client = CLIENT.get()
        stop = {"stopping_criteria": [lambda *_, **__: client.done()]}
        return await generate(manager, model, processor, {**inputs, **stop}, *rest, **named)

    return within


def whole_messages(convert: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    """Wrap a handler's `get_processor_inputs_from_messages`, so that templates get the same as in training.
    By itself it leaves out reasoning, names and the text beside calls, and puts spaces between parts."""

    @wraps(convert)
    def within(messages: Sequence[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        whole = []
        for given, converted in zip(messages, convert(messages, modality), strict=True):
            content = given.get("content") or ""
            parts = [{"text": content}] if isinstance(content, str) else content
            if any("text" not in part for part in parts):
                raise UserError("a message's content must be text")
            text = "".join(part["text"] for part in parts)
            thought = next((given[key] for key in REASONING if given.get(key)), None)
            more = {} if thought is None else dict.fromkeys(REASONING[:2], thought)
            whole.append({**given, **converted, **more, "content": text})
        return whole

    return within


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop sequence in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def _stops(config: Any) -> list[str]:
    given = config.stop_strings
    return [given] if isinstance(given, str) else list(given or ())


def without_stop(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A manager's `generate_non_streaming` whose text ends before a stop sequence, as at OpenAI."""

    @wraps(generate)
    async def cut(manager: Any, model: Any, processor: Any, inputs: Any, config: Any, **named: Any) -> Any:
        text, *rest = await generate(manager, model, processor, inputs, config, **named)
        return (before_stop(text, _stops(config)), *rest)

    return cut


def streamed_without_stop(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A manager's `generate_streaming` whose text ends before a stop sequence."""

    @wraps(generate)
    def cut(manager: Any, model: Any, processor: Any, inputs: Any, config: Any, **named: Any) -> Any:
        queue, streamer = generate(manager, model, processor, inputs, config, **named)
        stops = _stops(config)
        return (BeforeStop(queue, stops) if stops else queue), streamer

    return cut


class BeforeStop:
    """The pieces of text and other items of a queue, without the first stop sequence and the text behind it.

    A piece's end that may be the beginning of a stop sequence waits for the next piece.
    """

    def __init__(self, queue: "asyncio.Queue[Any]", stops: Sequence[str]) -> None:
        self._queue, self._stops = queue, stops
        self._ready: deque[Any] = deque()
        self._held = ""
        self._stopped = False

    async def get(self) -> Any:
        while not self._ready:
            self._take(await self._queue.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        while not self._ready:
            self._take(self._queue.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        if type(item) is not str:  # reasoning, a tool call, an error or the end
            self._put(len(self._held))
            self._ready.append(item)
        elif not self._stopped:
            self._held += item
            text = before_stop(self._held, self._stops)
            self._stopped = text != self._held
            begun = (
                size
                for size in range(len(text), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self._stops)
            )
            self._put(len(text) - (0 if self._stopped else next(begun, 0)))
            self._held = "" if self._stopped else self._held

    def _put(self, size: int) -> None:
        if size:
            self._ready.append(self._held[:size])
        self._held = self._held[size:]


def checked(app: App, host: str) -> App:
    """An ASGI app that answers one line of JSON where `app`, which listens at `host`, would fail."""

    async def answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        started = streams = False

        async def pass_on(message: dict[str, Any]) -> None:
            nonlocal started, streams
            if started or message.get("status", 500) != 500:
                if not started and scope["path"].endswith("completions"):
                    kind = dict(message["headers"]).get(b"content-type", b"")
                    streams = kind.startswith(b"text/event-stream")
                started = True
                if streams and message["type"] == BODY and not message.get("more_body"):
                    message = {**message, "body": message.get("body", b"") + END_OF_STREAM}
                await send(message)  # else its exception follows

        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        try:
            asked = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if asked and is_loopback(host) and not is_loopback(host_name(asked)):
                raise UserError("this server is on loopback only")
            await app(scope, await _amended(receive, scope["path"]), pass_on)
        except Exception as error:
            if started:
                raise
            if isinstance(error, UserError):
                status, line = HTTPStatus.BAD_REQUEST, str(error)
            elif isinstance(error, (RuntimeError, OSError, MemoryError)):
                status, line = HTTPStatus.INTERNAL_SERVER_ERROR, f"the server failed: {error}"
                log.exception("a request failed")
            else:
                status, line = HTTPStatus.BAD_REQUEST, f"this request fails: {type(error).__name__}: {error}"
            told = {"message": " ".join(line.split()), "type": status.phrase, "param": None, "code": None}
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": BODY, "body": json.dumps({"error": told}).encode()})

    return answer


async def _amended(receive: Receive, path: str) -> Receive:
    """Read a request, and return a `receive` for the request in the form of `served`. Sets `CLIENT`."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST_BYTES:
            raise UserError(f"the request is larger than {MOST_BYTES:,} bytes")
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: the server itself says so
        content = json.loads(body)
        body = json.dumps(served(content, path)).encode() if isinstance(content, dict) else body
    messages = [{"type": "http.request", "body": body}]
    gone = asyncio.ensure_future(receive())  # a message after the body: the client left, or has its answer
    CLIENT.set(gone)

    async def first_the_body() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.shield(gone)

    return first_the_body


def main() -> None:
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))  # typer would exit with 1
    import uvicorn
    from transformers import GenerationMixin
    from transformers.cli.transformers import main as transformers

    class Config(uvicorn.Config):
        def __init__(self, app: App, **options: Any) -> None:
            super().__init__(checked(app, options["host"]), **options)

    uvicorn.Config = Config  # type: ignore[misc, assignment]
    GenerationMixin.generate = bounded(GenerationMixin.generate)  # type: ignore[method-assign]
    with contextlib.suppress(ImportError):  # the first versions of transformers 5 have no such manager
        from transformers.cli.serving.utils import BaseHandler, GenerateManager

        whole = without_stop(until_client_leaves(GenerateManager.generate_non_streaming))
        GenerateManager.generate_non_streaming = whole  # type: ignore[assignment, method-assign]
        pieces = streamed_without_stop(GenerateManager.generate_streaming)
        GenerateManager.generate_streaming = pieces  # type: ignore[method-assign]
        messages = whole_messages(BaseHandler.get_processor_inputs_from_messages)
        BaseHandler.get_processor_inputs_from_messages = staticmethod(messages)  # type: ignore[method-assign]
    transformers()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
