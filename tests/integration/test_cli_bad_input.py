"""A user's mistakes end in one clear line and exit code 2, and leave nothing behind."""

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from node.run_file.loader import to_toml
from node.state.families import write_config
from node.telemetry.events import JoinLine
from tests.support.fault_prefork import Prefork
from tests.support.ports import free_port
from tests.support.run_harness import Process, Run

pytestmark = pytest.mark.timeout(240)


def one_line(process: Process, code: int = 2) -> str:
    """The single line that a refusing command printed."""
    assert process.wait_exit() == code, process.report()
    assert process.lines == []
    (line,) = process.stderr.splitlines()
    assert line.startswith("thinwire: error: ")
    return line.removeprefix("thinwire: error: ")


def no_change(run: Run) -> None:
    pass


def remove_text(run: Run) -> None:
    run.text_file.unlink()


def short_text(run: Run) -> None:
    run.text_file.write_bytes(b"to be or not to be")


def damage_model(run: Run) -> None:
    folder = run.directory / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_config(run.config.model, "float32")))
    (folder / "model.safetensors").write_bytes((2000).to_bytes(8, "little") + b"{}")
    config = replace(run.config, model=replace(run.config.model, from_=str(folder)))
    run.run_file.write_text(to_toml(config))


@pytest.mark.parametrize(
    ("spoil", "overrides", "words"),
    [
        (damage_model, [], "2000 bytes"),
        (remove_text, [], "no file or folder {text}"),
        (short_text, [], "18 tokens"),
        (
            no_change,
            ["pipeline.forward_codec=aqsgd-3", "pipeline.cache_gb=1e-4", "data.shift=false"],
            "pipeline.cache_gb allows 0.0001",
        ),
    ],
    ids=lambda value: (
        value.__name__ if callable(value) else " ".join(value) if isinstance(value, list) else ""
    ),
)
def test_a_run_that_cannot_start(
    spoil: Callable[[Run], None], overrides: list[str], words: str, prefork: Prefork, tmp_path: Path
) -> None:
    with Run(tmp_path, launch=prefork.popen) as run:
        spoil(run)
        line = one_line(run.start(*overrides))
        assert words.format(text=run.text_file) in line
        assert not run.run_dir.exists()
        run.assert_quiet()


@pytest.mark.parametrize(
    ("offset", "one_port"), [(0, "true"), (1, "false")], ids=["join-port", "control-port"]
)
def test_a_port_that_is_taken(offset: int, one_port: str, prefork: Prefork, tmp_path: Path) -> None:
    """The same command works once the port is free: the failed start left no run behind."""
    with Run(tmp_path, launch=prefork.popen) as run:
        port = free_port(neighbours=2)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port + offset))
            taken.listen()
            ports = (f"coordinator.listen=127.0.0.1:{port}", f"coordinator.one_port={one_port}")
            line = one_line(run.start(*ports))
            assert f"cannot listen at 127.0.0.1:{port + offset}" in line
        assert not run.run_dir.exists()
        again = run.start(*ports)
        again.wait_event(JoinLine)
        again.interrupt()
        run.assert_quiet()
        assert again.exit_code == 130


def test_directories_that_hold_a_run_or_none(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, launch=prefork.popen) as run:
        first = run.start()
        first.wait_event(JoinLine)
        first.interrupt()
        assert first.wait_exit() == 130
        database = (run.run_dir / "run.db").read_bytes()

        assert "thinwire resume" in one_line(run.start())
        assert "contains no run" in one_line(run.command("resume", str(tmp_path)))
        assert "is not a directory" in one_line(run.command("resume", str(tmp_path / "nowhere")))

        text = run.text_file.read_bytes()
        run.text_file.write_bytes(text.replace(b"line 7", b"lime 7"))
        assert "not the text" in one_line(run.command("resume", str(run.run_dir)))
        run.text_file.unlink()
        assert f"no file or folder {run.text_file}" in one_line(run.command("resume", str(run.run_dir)))
        assert (run.run_dir / "run.db").read_bytes() == database

        run.text_file.write_bytes(text)
        again = run.resume()
        again.wait_event(JoinLine)
        # A second coordinator would give out the same steps again.
        assert "another coordinator is running with" in one_line(run.command("resume", str(run.run_dir)))
        again.interrupt()
        run.assert_quiet()
        assert again.exit_code == 130
