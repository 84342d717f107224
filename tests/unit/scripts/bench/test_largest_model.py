"""scripts/bench/largest_model.py runs from end to end without a GPU."""

import json
from pathlib import Path

import pytest

from scripts.bench.largest_model import main
from scripts.docs import small_cards


def test_a_small_model_goes_the_same_path_on_a_cpu_and_into_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "largest.json"
    options = ["--tiny", "--runs", "1", "--microbatches", "2", "--products", "precision", "fp8"]
    assert main([*options, "--out", str(out)]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [row["products"] for row in report["rows"]] == ["precision", "fp8"]
    for row in report["rows"]:
        assert row["fits"] and row["ran_short"] == 0 and row["tokens_a_second"] > 0
        assert "weights of 8 of 8 blocks in host memory" in row["plan"]
        assert ("codes of 8 of 8 blocks in host memory" in row["plan"]) == (row["products"] == "fp8")
        assert "gradients of 8 of 8 blocks in host memory" in row["plan"]
        # All that the plan says is there, and no more than that.
        assert 0 < row["host_bytes_taken"] <= row["host_bytes"]
        assert len(set(row["losses"])) == 2
    for row in report["rows"]:
        row["peak_bytes"] = 22_500_000_000  # of a GPU
    out.write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setattr(small_cards, "LARGEST_MODEL", out)
    table = small_cards.largest_model()
    assert table.count("thinwire, a CPU") == 2 and table.count("LLMQ, RTX 4090") == 4
    assert f"{report['rows'][0]['tokens_a_second']:,.0f} |" in table and "| 22.5 |" in table
