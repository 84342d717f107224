"""The recorded picture of the convergence runs: every codec of every suite, drawn from the recorded runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from scripts.docs import losses, markdown, plot_convergence

ROOT = Path(__file__).resolve().parents[4]


def run(suite: str, forward: str, backward: str, last: float, seed: int = 0) -> dict[str, Any]:
    steps = [9.0 + (last - 9.0) * step / 40 for step in range(41)]
    return {
        "suite": suite,
        "forward": forward,
        "backward": backward,
        "seed": seed,
        "steps": len(steps),
        "losses": steps,
        "loss_valid": last + 0.1,
    }


RUNS = [
    run("long", "fp16", "fp16", 4.0),
    run("long", "fp16", "fp16", 4.02, seed=1),
    run("long", "tah", "fixed-8", 4.1),
    run("pass", "fp16", "fp16", 4.6),
    run("pass", "fp32", "fp32", 4.65),
    run("pass", "fixed-4", "fixed-8", 4.8),
    run("epochs", "fp16", "fp16", 4.2),
    run("epochs", "aqsgd-4", "fixed-8", 4.3),
    run("backward", "fp16", "naive-4", 6.5),
    run("backward", "fp16", "tah", 4.7),
    run("memory", "fp32", "fp32", 4.5),
]


def recorded(tmp_path: Path, runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "convergence.json"
    path.write_text(json.dumps({"tokens_a_step": 65536, "runs": runs}), encoding="utf-8")
    for module in (plot_convergence, losses):
        monkeypatch.setattr(module, "CONVERGENCE", path)
    return path


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg.read_text(encoding="utf-8"))


def test_every_run_of_every_suite_has_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path, RUNS, monkeypatch)
    out = tmp_path / "drawn.svg"
    assert plot_convergence.main(["--out", str(out)]) == 0
    written = texts(out)
    # Once a panel that has it, and once in the key of the last panel; fp16 also beside few bits backward.
    for label, times in {
        "fp16 / fp16": 4 + 1,
        "fp16 / fp16, seed 1": 1,
        "tah / fixed-8": 1 + 1,
        "fixed-4 / fixed-8": 1 + 1,
        "aqsgd-4 / fixed-8": 1 + 1,
        "fp16 / naive-4": 1,
        "fp16 / tah": 1,
    }.items():
        assert written.count(label) == times, label
    for words in losses.SUITES.values():
        title = words.format(tokens=41 * 65536 / 1e6)
        assert title in written, title


def test_a_codec_has_one_colour_and_few_bits_backward_are_dashed() -> None:
    looks = plot_convergence._looks([one for one in RUNS if one["suite"] in losses.SUITES])
    forward = {pair: look["color"] for pair, look in looks.items() if look["linestyle"] == "-"}
    assert len(set(forward.values())) == len(forward) == 5
    backward = {pair: look["color"] for pair, look in looks.items() if look["linestyle"] == "--"}
    assert backward.keys() == {("fp16", "naive-4"), ("fp16", "tah")}
    assert backward["fp16", "tah"] == forward["tah", "fixed-8"]
    assert backward["fp16", "naive-4"] not in forward.values()


def test_the_recorded_picture_is_of_the_recorded_runs() -> None:
    runs = markdown.read_report(losses.CONVERGENCE)["runs"]
    assert plot_convergence.description(runs) in plot_convergence.OUT.read_text(encoding="utf-8"), (
        "run scripts/docs/plot_convergence.py"
    )
    changed = [{**one, "losses": [*one["losses"][:-1], 0.0]} for one in runs]
    assert plot_convergence.description(changed) != plot_convergence.description(runs)


def test_sentences_come_from_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path, RUNS, monkeypatch)
    said = " ".join(losses.convergence_words().split())
    assert "`tah` +2.44 %; two seeds of fp16 lie 0.49 % apart" in said
    assert "at 6.60 by `naive-4`, where fp16 has 4.70; by `tah` 4.80" in said
    assert "lie up to 1.06 % apart" in said


def test_what_stands_in_for_aqsgd_is_said() -> None:
    aqsgd = {**run("epochs", "aqsgd-4", "fixed-8", 4.3), "remembered": "torch.bfloat16"}
    assert losses._remembered(RUNS) == "float16, the codec in bf16"
    assert losses._remembered([*RUNS, aqsgd]) == "bfloat16 and float16, the codec in bf16"
    assert losses._remembered([aqsgd]) == "bf16, as the codec does"


def test_commits_are_those_of_the_runs() -> None:
    runs = [{"commit": "b" * 40}, {"commit": None}, {}]
    assert markdown.commits({"commit": "a" * 40}, runs) == f"{'a' * 12}, {'b' * 12}"
