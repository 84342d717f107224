"""`config explain` on the text: tokens, passes, and a codec's sample cache."""

import json
from pathlib import Path

import pytest

from node.cli.main import main

RUN = """
[run]
steps = 50
[model]
hidden = 32
heads = 4
kv_heads = 4
layers = 4
sequence = 16
[data]
path = "{text}"
shift = false
[training]
global_batch = 8
microbatch = 4
[pipeline]
stages = 4
forward_codec = "aqsgd-4"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("0123456789abcde\n" * 125)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(text=tmp_path / "text.txt"))
    return path


def test_text_and_sample_cache(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", str(run_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # A tenth of the 2000 bytes is held out; the 1800 others hold 112 windows of 16 and a label.
    assert (
        "text     1.8k tokens to train on, 200 held out; 112 samples a pass, so 50 steps are 3.57 passes"
        in lines
    )
    one = 112 * (16 * 32 * 2 + 12)
    (cache,) = (line for line in lines if line.startswith("cache    "))
    assert cache.startswith("cache    aqsgd-4 caches up to 116 kB, 232 kB, 232 kB, 116 kB of activations")
    wrapped = " ".join(line.strip() for line in lines)
    assert "a snapshot grows by 348 kB; the first pass takes 16.2 bits an element" in wrapped
    assert main(["config", "explain", str(run_file), "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text["sample_cache"]["stages"] == [one, 2 * one, 2 * one, one]
    assert text["sample_cache"]["snapshot"] == 3 * one
    assert (text["tokens"], text["held_out"], text["samples"]) == (1800, 200, 112)


def test_more_than_the_limit_is_refused(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", str(run_file), "pipeline.cache_gb=2e-4"]) == 2
    error = capsys.readouterr().err
    assert "would keep 0.000232 GB of activations at one of 4 stages (112 samples of 16 x 32)" in error
    assert len(error.splitlines()) == 1


def test_a_text_that_is_elsewhere_is_said_so(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", str(run_file), "data.path=/nowhere/text.txt"]) == 2
    said = capsys.readouterr()
    assert "text     not read: no file or folder /nowhere/text.txt" in said.out
    assert "no file or folder /nowhere/text.txt" in said.err
