"""scripts/bench/llama_7b.py runs from end to end without a GPU, and into its table."""

import json
from pathlib import Path

import pytest

from scripts.bench.llama_7b import COAT, main
from scripts.docs import small_cards


def test_a_small_model_goes_the_same_path_on_a_cpu_and_into_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "llama.json"
    assert main(["--tiny", "--out", str(out)]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [row["gpus"] for row in report["rows"]] == [given["gpus"] for given in COAT]
    for row in report["rows"]:
        assert [one["samples"] for one in row["measured"]] == [1, 2]
        assert all(one["step_seconds"] > 0 for one in row["measured"])
        for one in row["measured"]:
            one["peak_bytes"] = one["samples"] * 11 * 10**9  # of a GPU
    report["rows"][0]["measured"] = []
    out.write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setattr(small_cards, "LLAMA_7B", out)
    lines = small_cards.llama_7b().splitlines()
    assert "| out of memory | out of memory |" in lines[2] and "| 79.3 | 11.0 |" in lines[3]
    assert "| 52.8 | 22.0 |" in lines[5]
