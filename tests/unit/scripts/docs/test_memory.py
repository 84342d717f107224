"""The table of packing inside a matrix product: times against the producer's, and how often it wins."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.docs import memory

REPORT: dict[str, Any] = {
    "commit": "0123456789abcdef",
    "hardware": "A GPU",
    "versions": {"torch": "2.13.0", "triton": "3.6.0"},
    "tokens": 8192,
    "runs": 25,
}


def row(layer: str, producer: float, fused: float) -> dict[str, Any]:
    times = {"producer": producer, "separate": 2.2, "fused": fused}
    return {
        "model": "A model",
        "layer": layer,
        "dtype": "bfloat16",
        "width": 13824,
        "columns": 5120,
        "milliseconds": {**times, "unstored": 1.9, "fused_unstored": 2.5, "gemm": 1.6},
    }


def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> list[str]:
    path = tmp_path / "quantize_gemm.json"
    path.write_text(json.dumps({**REPORT, "rows": rows}), encoding="utf-8")
    monkeypatch.setattr(memory, "QUANTIZE_GEMM", path)
    return memory.quantize_gemm().splitlines()


def test_times_are_shown_beside_the_producers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table(tmp_path, monkeypatch, [row("down", 2.0, 3.0), row("norm, QKV", 2.5, 2.0)])
    assert lines[0].startswith("| block | layer | packed from | matrix | packed in the producer, ms |")
    assert lines[2] == (
        "| A model | down | bfloat16 | 13824 x 5120 | 2.000 | 2.200 (+10.0 %) | 3.000 (+50.0 %) "
        "| 1.900 | 2.500 | 1.600 |"
    )
    assert "| 2.500 | 2.200 (-12.0 %) | 2.000 (-20.0 %) |" in lines[3]
    assert "8192 tokens" in lines[-1] and "beats in 1 of 2. Medians of 25 turns" in lines[-1]
    assert lines[-1].endswith("A GPU, torch 2.13.0, Triton 3.6.0, commit 0123456789ab.")
