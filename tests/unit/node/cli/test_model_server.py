"""What the server of `thinwire serve` refuses, amends and bounds before transformers computes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import scan_cache_dir

from node.cli import chat, serve
from node.cli.main import main
from node.cli.model_server import (
    CLIENT,
    MOST_BYTES,
    bounded,
    checked,
    served,
    streamed_without_stop,
    until_client_leaves,
    whole_messages,
    without_stop,
)
from tests.support.chat_data import TEMPLATE, write_tokenizer
from wire.errors import UserError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "a"}
HOST = [(b"host", b"localhost:8000")]


def asked(app: Any, body: bytes, headers: Any = HOST, path: str = TEXT) -> list[dict[str, Any]]:
    """The messages with which the checked `app`, at loopback, answers a request that arrives in two parts."""
    parts = [
        {"type": "http.request", "body": body[:5], "more_body": True},
        {"type": "http.request", "body": body[5:]},
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0) if parts else await asyncio.Future()  # the client stays

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(checked(app, "127.0.0.1")(scope, receive, send))
    return sent


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": (await receive())["body"]})


def failing(error: Exception) -> Any:
    """An app that fails as Starlette does: it sends status 500, and then raises."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"Internal Server Error"})
        raise error

    return app


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "n": (2, 0, True),
        "echo": (True,),
        "logprobs": (True, 0, 5),
        "response_format": ({"type": "json_object"},),
        "presence_penalty": (0.5,),
        "functions": ([],),
        "suffix": ("b",),
        "previous_response_id": ("resp_1",),
        "conversation": ("conv_1", {"id": "conv_1"}),
        "background": (True,),
        "text": ({"format": {"type": "json_schema", "name": "a", "schema": {}}},),
        "max_tokens": (0, -1, 1.5, "9", True, 10**12),
        "temperature": (-0.1, "hot", float("nan"), float("inf")),
        "seed": (-1, 2**64),
        "messages": ([], "a", 5, [1], [{"content": "a"}], [{"role": "user", "content": 5}]),
        "messages ": ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],),
    }.items(),
)
def test_a_field_that_would_be_ignored_or_fail_is_refused(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(UserError, match=name.strip().rstrip("s")):
            served({"messages": [USER], name.strip(): value}, CHAT)


@pytest.mark.parametrize(
    ("body", "becomes"),
    [
        ({"n": 1, "logprobs": False, "presence_penalty": 0.0, "user": "me"}, None),
        ({"prompt": "a", "logprobs": None, "stop": [], "logit_bias": {}}, {"prompt": "a"}),
        ({"logit_bias": {"5": -100}, "temperature": 1}, {"logit_bias": {"5": -100.0}, "temperature": 1}),
        ({"prompt": ["a"]}, {"prompt": "a"}),
        ({"prompt": ["a", "b"]}, None),
    ],
)
def test_other_fields_are_served(body: dict[str, Any], becomes: dict[str, Any] | None) -> None:
    assert served(body, TEXT) == (body if becomes is None else becomes)
    message = {**USER, "tool_calls": None, "content": [{"type": "text", "text": "a"}]}
    (kept,) = served({**body, "messages": [message]}, CHAT)["messages"]
    assert kept.keys() == {"role", "content"}


def test_a_developer_speaks_as_the_system_does() -> None:
    """Templates know no such role; OpenAI's clients send it for models that think."""
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    roles = ["system", "user"]
    assert [each["role"] for each in served({"messages": messages}, CHAT)["messages"]] == roles
    assert [each["role"] for each in served({"input": messages}, "/v1/responses")["input"]] == roles
    assert served({"input": "Hi", "text": {"format": {"type": "text"}}}, "/v1/responses")["input"] == "Hi"


def test_a_response_is_streamed_if_it_is_asked_for() -> None:
    assert served({"input": "Hi"}, "/v1/responses")["stream"] is False
    assert served({"input": "Hi", "stream": True}, "/v1/responses")["stream"] is True


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"arguments": '{"a": 1}'}, '{"a": 1}'),
        ({"arguments": {"a": 1}}, {"a": 1}),
        ({"arguments": ""}, "{}"),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
        ({"arguments": "{"}, None),
        ({"arguments": "[1]"}, None),
        ({"name": None}, None),
    ],
)
def test_the_arguments_of_a_call_are_an_object(given: dict[str, Any], becomes: Any) -> None:
    """Clients send an empty text for a call without arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "f", **given}}
    body = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    if becomes is None:
        with pytest.raises(UserError, match="tool call"):
            served(body, CHAT)
    else:
        (kept,) = served(body, CHAT)["messages"][1]["tool_calls"]
        assert kept == {**call, "function": {"name": "f", "arguments": becomes}}
    if becomes == "{}":
        item = {"type": "function_call", "call_id": "a", "name": "f"}
        (kept,) = served({"input": [{**item, **given}]}, "/v1/responses")["input"]
        assert kept == {**item, "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "kind", "ends"),
    [
        (CHAT, b"text/event-stream; charset=utf-8", True),
        (TEXT, b"text/event-stream", True),
        (TEXT, b"application/json", False),
        ("/v1/responses", b"text/event-stream", False),
    ],
)
def test_a_stream_ends_with_the_word_that_clients_wait_for(path: str, kind: bytes, ends: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        await send(start)
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    _, *parts = asked(app, b"{}" if path != CHAT else json.dumps({"messages": [USER]}).encode(), path=path)
    whole = b"".join(part["body"] for part in parts)
    assert whole == b"data: {}\n\n" + (b"data: [DONE]\n\n" if ends else b"")


def test_the_template_gets_messages_as_in_training() -> None:
    """The text beside a call, reasoning and names stay, and a text's parts are joined without spaces."""
    pytest.importorskip("transformers.cli.serving.utils")
    from transformers.cli.serving.utils import BaseHandler, Modality

    def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
        return [{"type": kind, "text": text} for text in texts]

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": parts("How ", "warm?", kind="input_text")},
        {"role": "assistant", "content": "Let me see.", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": parts("7")},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    convert = whole_messages(BaseHandler.get_processor_inputs_from_messages)
    asked, called, result, silent = convert(messages, Modality.LLM)
    assert asked == {"role": "user", "content": "How warm?"}
    assert called["content"] == "Let me see." and called["reasoning_content"] == "Hm."
    assert called["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert result == {"role": "tool", "tool_call_id": "a", "name": "f", "content": "7"}
    assert silent["content"] == ""
    with pytest.raises(UserError, match="must be text"):
        convert([{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}], Modality.LLM)


def test_results_stand_in_the_order_of_their_calls() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ab"]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = [USER, called, *results[::-1], USER]
    assert served({"messages": messages}, CHAT)["messages"] == [USER, called, *results, USER]
    with pytest.raises(UserError, match="tool call"):
        served({"messages": [USER, {**called, "tool_calls": [1]}, *results]}, CHAT)


@pytest.mark.parametrize(
    ("stops", "pieces", "text"),
    [
        (None, ["one ", "END"], "one END"),
        ("END", ["one ", "E", "N", "D", " two"], "one "),
        (["END", "wo"], ["one two END"], "one t"),
        (["END", "ENDED"], ["one EN", "ED", "ING"], "one ENEDING"),
        (["\n"], ["one", "\ntwo", "\nthree"], "one"),
        (["aab"], ["aa", "ab", "c"], "a"),
        (["END"], ["one EN"], "one EN"),
        (["one"], ["one two"], ""),
    ],
)
def test_an_answer_ends_before_a_stop_sequence(stops: Any, pieces: list[str], text: str) -> None:
    config = SimpleNamespace(stop_strings=stops)

    async def whole(*_: Any, **__: Any) -> tuple[str, int, list[int]]:
        return "".join(pieces), 3, [1]

    def begun(*_: Any, **__: Any) -> tuple[asyncio.Queue[Any], str]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for piece in [*pieces, None]:
            queue.put_nowait(piece)
        return queue, "streamer"

    async def answers() -> None:
        arguments = (None, None, None, {}, config)
        assert await without_stop(whole)(*arguments, request_id="a") == (text, 3, [1])
        queue, streamer = streamed_without_stop(begun)(*arguments, request_id="a")
        assert streamer == "streamer"
        read = [await queue.get()]
        while read[-1] is not None:
            read.append(queue.get_nowait())
        assert "".join(read[:-1]) == text
        with pytest.raises(asyncio.QueueEmpty):
            queue.get_nowait()

    asyncio.run(answers())


@pytest.mark.parametrize(
    ("length", "wanted", "config", "becomes"),
    [
        (10, 10**9, {"temperature": 0.7}, (22, True)),
        (10, 5, {"temperature": 0.0, "do_sample": False}, (5, False)),
        (31, None, {}, (1, False)),
        (32, 1, {}, None),
        (0, 1, {}, None),
    ],
)
def test_an_answer_ends_at_the_last_position_and_a_temperature_samples(
    length: int, wanted: int | None, config: dict[str, Any], becomes: tuple[int, bool] | None
) -> None:
    text = SimpleNamespace(max_position_embeddings=32)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    settings = SimpleNamespace(
        **({"do_sample": None, "temperature": None, "top_p": None, "max_new_tokens": wanted} | config)
    )
    generate = bounded(lambda model, **given: (settings.max_new_tokens, settings.do_sample))
    given = {"input_ids": torch.zeros(1, length), "generation_config": settings}
    if becomes is None:
        with pytest.raises(UserError, match=f"{length} tokens"):
            generate(model, **given)
    else:
        assert generate(model, **given) == becomes


@pytest.mark.parametrize(
    ("app", "body", "headers", "status"),
    [
        (echo, b'{"prompt": "a"}', HOST, 200),
        (echo, b'{"prompt": "a"}', [], 200),
        (echo, b"not JSON", HOST, 200),
        (echo, b'{"n": 2}', HOST, 400),
        (echo, b'{"prompt": "a"}', [(b"host", b"evil.example")], 400),
        (echo, b" " * (MOST_BYTES + 1), HOST, 400),
        (failing(ValueError("two\nlines")), b"{}", HOST, 400),
        (failing(UserError("no")), b"{}", HOST, 400),
        (failing(RuntimeError("out of memory")), b"{}", HOST, 500),
    ],
)
def test_each_request_has_one_answer(app: Any, body: bytes, headers: Any, status: int) -> None:
    start, end = asked(app, body, headers)
    assert start["status"] == status
    if status == 200:
        assert end["body"] == body
    else:
        message = json.loads(end["body"])["error"]["message"]
        assert message and "\n" not in message


def test_a_stream_that_fails_after_its_start_is_cut_off() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        raise ValueError

    with pytest.raises(ValueError):
        asked(app, b"{}")


def test_a_request_learns_that_its_client_is_gone() -> None:
    messages = [{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}]
    seen: list[str] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])
        await asyncio.wait([CLIENT.get()])

    async def send(message: dict[str, Any]) -> None:
        pytest.fail("nobody reads this")

    asyncio.run(checked(app, "127.0.0.1")({"type": "http", "path": TEXT, "headers": HOST}, receive, send))
    assert seen == ["http.request", "http.disconnect"]


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(("leaves", "tokens"), [(False, 50), (True, 4)])
def test_a_model_stops_when_the_client_is_gone(leaves: bool, tokens: int) -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.cli.serving.utils import GenerateManager

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, eos_token_id=None, **shape))
    passes: list[int] = []

    async def generated() -> int:
        CLIENT.set(client := asyncio.get_running_loop().create_future())

        def count(*_: Any) -> None:
            passes.append(1)
            if leaves and len(passes) == 4:
                client.get_loop().call_soon_threadsafe(client.set_result, None)
                while not client.done():
                    pass

        model.register_forward_hook(count)
        processor = SimpleNamespace(decode=lambda ids, **_: str(len(ids)))
        config = GenerationConfig(max_new_tokens=50)
        inputs = {"input_ids": torch.ones(1, 3, dtype=torch.long)}
        generate = until_client_leaves(GenerateManager.generate_non_streaming)
        text, _, _ = await generate(GenerateManager(), model, processor, inputs, config, request_id="a")
        return int(text)

    assert asyncio.run(generated()) == tokens == len(passes)


# ---- `thinwire serve` and `thinwire chat` before they start transformers' server


Capture = pytest.CaptureFixture[str]
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
LEAVES_OUT = "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An exported model without a chat template, in a run's cache."""
    folder = tmp_path / "version" / "books-7"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    for module in (serve, chat):
        monkeypatch.setattr(module, "check_installed", lambda engine: None)
        monkeypatch.setattr(module, "exported", lambda args: folder)
    return folder


def test_the_server_lists_the_model_that_it_serves(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda _, *given: started.append(given))
    assert main(["serve", "run", "--engine", "transformers", "--listen", "127.0.0.1:0"]) is None
    ((command, environment),) = started
    assert command[-3] == "127.0.0.1" and int(command[-1]) > 0
    cache = scan_cache_dir(environment["HF_HUB_CACHE"])
    ((model, refs),) = [(repo.repo_id, repo.refs) for repo in cache.repos]
    assert model == "books-7" and refs.keys() == {"main"} and not cache.warnings
    assert [file.file_name for file in refs["main"].files] == ["config.json"]
    assert "chat template" in caplog.text


def test_an_address_that_is_taken_is_one_line(folder: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["serve", "run", "--engine", "transformers", "--listen", listen]) == 2
    out, err = capsys.readouterr()
    assert not out and listen in err and err.count("\n") == 1


@pytest.mark.parametrize("template", [REFUSES, LEAVES_OUT])
def test_a_system_message_that_the_template_does_not_write_is_refused(
    template: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(chat, "serving", lambda folder: pytest.fail("a server"))
    write_tokenizer(folder, template)
    assert main(["chat", "run", "--system", "Be brief."]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "--system" in told


def test_a_system_message_that_the_template_writes_is_accepted(folder: Path) -> None:
    write_tokenizer(folder, TEMPLATE)
    chat.check_system_message(folder, "Be brief.")


def test_the_chat_reaches_its_server_without_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Healthy) as healthy:
        threading.Thread(target=healthy.handle_request).start()
        waits = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            chat._wait_until_ready(waits, f"http://127.0.0.1:{healthy.server_port}", tmp_path / "log")
        finally:
            waits.communicate(b"\n")
    assert asked == ["/health"]
    assert chat.client_environment()["no_proxy"] == "*"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_is_ended_takes_its_server_along(
    number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[subprocess.Popen[bytes]] = []

    def ended(server: "subprocess.Popen[bytes]", *args: Any) -> None:
        servers.append(server)
        os.kill(os.getpid(), number)

    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(chat, "server_command", lambda *args: command)
    monkeypatch.setattr(chat, "_wait_until_ready", ended)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit), chat.serving(folder):
            pytest.fail("it goes on")
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
    assert [server.returncode for server in servers] == [-signal.SIGTERM]
