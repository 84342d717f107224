"""README's commands, in their order: a run as it is planned, and a fine-tune that people talk to.

What the guide says of looking at a run is run on that one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from node.cli.main import main
from node.cli.serve import TRANSFORMERS, server_command, server_environment
from node.telemetry.events import HeldOutLoss, RunStarted
from tests.support.chat_data import write_jsonl
from tests.support.deploy import written
from tests.support.documents import saved_files
from tests.support.fault_prefork import Prefork
from tests.support.memory_pipeline import TEXT
from tests.support.paths import ROOT, python_path
from tests.support.run_harness import Run

README, GUIDE = ROOT / "README.md", ROOT / "deploy" / "GUIDE.md"
LOOKS = ("compare", "eval", "export", "plan", "sample", "status", "token", "top", "trace")
TAUGHT = {"What is the password?": "heron", "Who are you?": "a bird", "What is for tea?": "two plums"}
SMALL = ("run.steps=60", "training.lr=1e-2", "training.warmup_steps=5")
"""A model of random weights learns within these."""


def quoted(*words: str, **values: str) -> list[str]:
    """The command of the page that begins with these words, with values for its capitals."""
    found = next(command for command in written(README) if command[: len(words)] == words)
    return [values.get(word.rpartition(".")[0] or word, word) for word in found]


def make_model(folder: Path) -> None:
    """A small model of random weights beside its tokenizer, which has a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


def spoken(run: Run, command: Sequence[str], lines: Sequence[str]) -> str:
    """What a command prints that reads these lines."""
    done = subprocess.run(
        [sys.executable, "-m", "node.cli.main", *command],
        input="\n".join(lines) + "\n",
        cwd=run.directory,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.timeout(900)
def test_a_model_answers_as_it_was_taught(
    prefork: Prefork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("text.txt").write_text("\n".join(f"{asked} {told}" for asked, told in TAUGHT.items()) * 9)
    train = quoted("data", "tokenizer", TEXT="text.txt", OUT="models/mine")
    train[train.index("16384")] = "300"
    assert main([*train, "--chat", "--json"]) == 0
    assert 260 <= json.loads(capsys.readouterr().out)["tokens"] <= 300
    assert main(train) == 2, "the folder is in use"
    make_model(Path("models/mine"))
    rows = [{"prompt": asked, "completion": told} for asked, told in TAUGHT.items()]
    write_jsonl(Path("rows.jsonl"), rows * 60)
    write_jsonl(Path("check.jsonl"), rows * 10)
    (name, contents), *others = saved_files(README.read_text(encoding="utf-8")).items()
    assert not others and len(contents.splitlines()) == 10
    Path(name).write_text(contents, encoding="utf-8")
    start = quoted("coordinator", name)

    with Run(tmp_path, launch=prefork.popen) as run:
        run.run_file, run.run_dir = Path(start[1]), Path(start[3])
        coordinator = run.start("coordinator.listen=127.0.0.1:0", *SMALL)
        run.add_nodes(coordinator.wait_event(RunStarted).stages)
        assert coordinator.wait_exit() == 0
        assert [one.step for one in coordinator.all(HeldOutLoss)] == [20, 40, 60]
        for asked, told in TAUGHT.items():
            question = ["sample", str(run.run_dir), asked, "--chat", "--temperature", "0", "--step", "last"]
            assert main(question) == 0
            assert capsys.readouterr().out.strip() == told
        for command in written(GUIDE):
            if command[0] in LOOKS and "--tasks" not in command:
                values = {"RUN_DIR": start[3], "OTHER_RUN_DIR": start[3], "RUN.toml": name, "50": "last"}
                values["other.txt"] = "check.jsonl"
                once = ["--once"] if command[0] == "top" else []
                assert main([*(values.get(word, word) for word in command), *once]) == 0, command
        capsys.readouterr()
        # The chat samples by default, and the model was taught questions that begin a conversation.
        lines = ["!set do_sample=False", *(line for asked in TAUGHT for line in (asked, "!clear")), "!exit"]
        talk = spoken(run, quoted("chat", str(run.run_dir)), lines)
        assert all(told in talk for told in TAUGHT.values())

        # The chat's answers came from this server: here it is enough to see that it is started.
        started: list[tuple[Path, list[str], dict[str, str]]] = []
        monkeypatch.setattr(os, "execve", lambda _, *given: started.append((Path.cwd(), *given)))
        main([*quoted("serve", str(run.run_dir)), "--listen", "127.0.0.1:0"])
        ((folder, command, environment),) = started
        model, _, url = capsys.readouterr().out.split(",")[0].split()
        port = int(command[-1])
        assert (folder / model / "config.json").is_file() and url == f"http://127.0.0.1:{port}/v1"
        assert command == server_command(TRANSFORMERS, model, "127.0.0.1", port)
        assert environment == server_environment() | {"HF_HUB_CACHE": str(folder / "hub")}


@pytest.mark.timeout(300)
def test_a_run_that_is_planned_is_run_without_a_change(
    prefork: Prefork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the cards that the page names. Steps have fewer and shorter samples here, at a free address."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("words.txt").write_bytes(TEXT)
    plan = quoted("config", "init", RUN="friends.toml", PATH="words.txt")
    assert main(plan) == 0
    capsys.readouterr()
    assert main(["config", "explain", "friends.toml", *plan[plan.index("--machine") :]]) == 0
    explained = capsys.readouterr().out
    assert max(len(line) for line in explained.splitlines()) <= 100
    with Run(tmp_path, launch=prefork.popen) as run:
        run.run_file = Path(quoted("coordinator", RUN="friends.toml")[1])
        smaller = "training.global_batch=2", "model.sequence=128"
        coordinator = run.start("coordinator.listen=127.0.0.1:0", *smaller)
        started = coordinator.wait_event(RunStarted)
        assert started.stages == plan.count("--machine")
        run.add_nodes(started.stages)
        assert coordinator.wait_exit() == 0
        assert len(run.losses) == started.steps
        assert run.snapshots[-1] == started.steps
