"""`thinwire eval --tasks`, with a package on the path that stands for lm-eval."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from node.cli import snapshot_model, task_scores
from node.cli.main import main
from node.coordinator.changes import leave_scores, take_scores
from node.telemetry.events import TaskScores
from node.telemetry.history import read_history
from tests.support.recorded_run import write_run

LM_EVAL = """
import json, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
model, _, prefix = options["--model_args"].removeprefix("pretrained=").partition(",prefix_token_id=")
assert pathlib.Path(model, "config.json").is_file()
print("lm-eval is at work")
if options["--tasks"] == "unknown":
    sys.exit(3)
out = pathlib.Path(options["--output_path"], "books-200")
out.mkdir()
scores = {"alias": "x", "acc,none": 0.25, "acc_stderr,none": 0.125, "f1,strict": 1, "loss,none": float("nan")}
results = {task: scores for task in options["--tasks"].split(",")}
results["asked"] = {"limit": int(options.get("--limit", 0)), "shots": int(options.get("--num_fewshot", 0))}
if prefix:
    results["asked"]["prefix"] = int(prefix)
text = "[]" if options["--tasks"] == "odd" else json.dumps({"results": results})
(out / "results_2030-01-01T00-00-00.json").write_text(text)
"""
METRICS = {"acc": 0.25, "acc_stderr": 0.125, "f1,strict": 1.0}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a snapshot of step 200, and lm-eval on the path."""
    directory, folder = tmp_path / "run", tmp_path / "exports" / "books-200"
    write_run(directory, ended=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(snapshot_model, "chosen_snapshot", lambda run, wanted: (None, 200, None))
    monkeypatch.setattr(task_scores, "exported", lambda args: folder if args.step == "200" else None)
    (tmp_path / "path" / "lm_eval").mkdir(parents=True)
    (tmp_path / "path" / "lm_eval" / "__init__.py").touch()
    (tmp_path / "path" / "lm_eval" / "__main__.py").write_text(LM_EVAL)
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'path'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return directory


def in_history(directory: Path) -> list[TaskScores]:
    return [entry.event for entry in read_history(directory) if isinstance(entry.event, TaskScores)]


@pytest.mark.parametrize(
    ("file", "ends", "asked"),
    [
        ("tokenizer_config.json", {}, {"prefix": 2.0}),
        ("tokenizer_config.json", {"eos_token": "<end>"}, {}),
        ("special_tokens_map.json", {"bos_token": {"content": "<begin>"}}, {}),
        ("other.json", {}, {"prefix": 2.0}),
    ],
)
def test_a_tokenizer_without_an_end_of_text_begins_with_a_line_break(
    file: str, ends: dict[str, Any], asked: dict[str, float], run_dir: Path
) -> None:
    folder = task_scores.exported(argparse.Namespace(step="200"))
    (folder / file).write_text(json.dumps(ends))
    tables = Tokenizer(models.WordLevel({"a": 0, "b": 1, "\n": 2}, unk_token="a"))
    tables.save(str(folder / "tokenizer.json"))
    assert main(["eval", str(run_dir), "--tasks", "piqa"]) == 0
    (found,) = in_history(run_dir)
    assert found.scores["asked"] == {"limit": 0.0, "shots": 0.0, **asked}


def test_scores_are_printed_and_recorded(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["eval", str(run_dir), "--tasks", "arc_easy, piqa", "--limit", "5", "--shots", "2", "--json"]
    assert main(command) == 0
    said = capfd.readouterr()
    asked = {"limit": 5.0, "shots": 2.0}
    found = TaskScores(step=200, limit=5, scores={"arc_easy": METRICS, "piqa": METRICS, "asked": asked})
    assert json.loads(said.out) == {"step": 200, "limit": 5, "scores": found.scores}
    assert "lm-eval is at work" in said.err
    assert in_history(run_dir) == [found]
    assert main(["eval", str(run_dir), "--tasks", "piqa"]) == 0
    assert "lm-eval at step 200: piqa acc 0.25 ± 0.12, f1,strict 1; asked" in capfd.readouterr().out
    assert len(in_history(run_dir)) == 2
    assert main(["status", str(run_dir), "--json"]) == 0
    shown: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert [(one["step"], one["limit"], one["scores"]["piqa"]) for one in shown["scores"]] == [
        (200, 5, METRICS),
        (200, 0, METRICS),
    ]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--tasks", "unknown"], 1, "lm-eval failed with exit code 3"),
        (["--tasks", "odd"], 1, "results_2030-01-01T00-00-00.json of lm-eval cannot be read"),
        (["--tasks", "piqa,"], 2, "--tasks takes names of lm-eval's tasks"),
        (["--tasks", "piqa", "--limit", "0"], 2, "--limit must be at least 1, got 0"),
        (["--tasks", "piqa", "--samples", "3"], 2, "--text and --samples are for the held-out loss"),
        (["--shots", "1"], 2, "--limit and --shots are for lm-eval"),
    ],
)
def test_what_goes_wrong_is_one_line_and_no_record(
    run_dir: Path, options: list[str], code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run_dir), *options]) == code
    error = capfd.readouterr().err
    assert words in error and "Traceback" not in error
    assert in_history(run_dir) == []


def test_without_the_package_one_line_says_how_to_install_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(task_scores, "PACKAGE", "lm_eval_that_is_not_there")
    assert main(["eval", str(run_dir), "--tasks", "piqa"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_scores_left_for_a_coordinator_are_taken_once(tmp_path: Path) -> None:
    found = TaskScores(step=3, limit=0, scores={"piqa": METRICS})
    leave_scores(tmp_path, found)
    (tmp_path / "scores-1.json").write_text('{"event": "task-scores"')
    assert take_scores(tmp_path) == [found]
    assert take_scores(tmp_path) == [] and list(tmp_path.iterdir()) == []
