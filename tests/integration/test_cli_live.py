"""`status`, `token`, `doctor`, and what reads snapshots, while a run is on."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.cli.main import main
from node.telemetry.events import SampleMade, SnapshotStored
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Process, Run

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=100_000, snapshot_every="3s", keep_snapshots=2),
    data=replace(SMALL.data, prompts=("def ", "--help")),
    pipeline=replace(SMALL.pipeline, stages=2),
)


def answer(process: Process) -> str:
    assert process.wait_exit() == 0, process.report()
    assert process.stderr == ""
    return "\n".join(process.lines)


def answered(*arguments: str) -> str:
    """The output of a command that needs no process of its own."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(arguments) == 0
    return shown.getvalue().removesuffix("\n")


def status(run: Run) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(answered("status", str(run.run_dir), "--json"))
    return whole


def tokens(run: Run) -> list[tuple[str, int, int]]:
    listed = json.loads(answered("token", "list", str(run.run_dir), "--json"))
    return [(token["state"], token["uses"], token["uses_allowed"]) for token in listed]


def read_snapshots(run: Run) -> None:
    """By commands that need no answer of the run."""
    directory, out = str(run.run_dir), run.directory / "out"
    exported = json.loads(answer(run.command("export", directory, str(out), "--json")))
    assert f"| steps | {exported['step']} |" in (out / "README.md").read_text()
    evaluated = json.loads(answer(run.command("eval", directory, "--json")))
    assert evaluated["step"] >= exported["step"] > 0
    assert 0 < evaluated["loss"] < 6
    sampled = answer(run.command("sample", directory, "def ", "--tokens", "9", "--temperature", "0"))
    assert sampled.startswith("def ") and len(sampled) > 4


@pytest.mark.timeout(240)
def test_commands_beside_a_live_run(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        coordinator = run.start()
        token = coordinator.token
        run.add_node().wait_line(lambda line: "waiting for a stage" in line)
        waiting = status(run)
        assert (waiting["state"], waiting["steps_done"], waiting["loss"]) == ("waiting for nodes", 0, None)
        assert waiting["nodes_admitted"] == [run.node_id(0)]
        assert waiting["usable_tokens"] == 1
        assert tokens(run) == [("usable", 1, 2)]

        created = json.loads(answered("token", "create", str(run.run_dir), "--uses", "3", "--json"))
        assert f"revoked {created['id']}" in answered("token", "revoke", str(run.run_dir), created["id"])
        assert tokens(run) == [("usable", 1, 2), ("revoked", 0, 3)]
        text = answered("token", "list", str(run.run_dir))
        assert created["id"] in text and created["token"] not in text

        healthy = answer(run.command("doctor", token, "--state-dir", str(tmp_path)))
        assert f"run {waiting['run_id']} at 127.0.0.1:" in healthy
        assert "clocks agree" in healthy
        assert "ready" in healthy

        # Slow, so that steps leave the processor to the commands.
        run.program = ("tests.support.slow_node", "node.cli.main")
        run.add_node()
        run.program = ("node.cli.main",)
        coordinator.wait_event(SnapshotStored, lambda stored: stored.step >= 4)
        training = status(run)
        assert training["state"] == "training"
        assert training["steps_done"] >= 4
        assert training["nodes_admitted"] == [run.node_id(0), run.node_id(1)]
        assert 1 <= len(training["snapshots"]) <= 3
        assert 0 <= training["snapshot_age_seconds"] < 600
        assert training["usable_tokens"] == 0
        shown = answered("status", str(run.run_dir))
        assert shown.startswith(f"run {training['run_id']}: training, ")
        assert "tokens/s" in shown

        read_snapshots(run)
        coordinator.wait_event(SampleMade, lambda sample: sample.prompt == "--help")
        first, second = status(run)["samples"][:2]
        assert [one["prompt"] for one in (first, second)] == ["def ", "--help"]
        assert first["step"] == second["step"] > 0 and "" not in (first["text"], second["text"])

        coordinator.interrupt()
        run.assert_quiet()
        stopped = status(run)
        done = run.snapshots[-1]
        assert (stopped["steps_done"], stopped["snapshots"][-1]) == (done, done)
        assert stopped["state"] == "stopped"
        assert len(stopped["snapshots"]) == 2
        assert "continue with: thinwire resume" in answered("status", str(run.run_dir))

        # The coordinator has ended, so the token can no longer be checked.
        unreachable = run.command("doctor", token, "--state-dir", str(tmp_path))
        assert unreachable.wait_exit() == 1
        assert "checks failed" in unreachable.lines[-1]
