"""`thinwire serve` and `thinwire chat` before they start transformers' server."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import scan_cache_dir

from node.cli import chat, serve
from node.cli.main import main
from tests.support.chat_data import TEMPLATE, write_tokenizer

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
