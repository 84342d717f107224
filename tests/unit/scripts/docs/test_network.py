"""The table of all-reduce: torchft's column and the count of GPUs appear when the report has them."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.docs import network

TIMES = {"fp8": 0.5, "bf16": 0.25, "fp32": 0.75}


def row(ranks: int, elements: int, **more: float) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "elements": elements,
        "runs": 20,
        "milliseconds": {**TIMES, **more},
        "bytes_sent": {"fp8": 100, "bf16": 200, "fp32": 400},
    }


def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> list[str]:
    path = tmp_path / "all_reduce.json"
    report = {
        "commit": "0123456789abcdef",
        "hardware": "A GPU",
        "versions": {"torch": "2.13.0", "torchft": "2026.1.1"},
        "rows": rows,
    }
    path.write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setattr(network, "ALL_REDUCE", path)
    return network.all_reduce().splitlines()


def test_without_figures_of_torchft_there_is_no_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = table(tmp_path, monkeypatch, [row(2, 16384)])
    assert lines[0] == "| elements | e4m3, ms | bf16, ms | fp32, ms | bytes of fp32 over e4m3 |"
    assert lines[2] == "| 16,384 | 0.500 | 0.250 | 0.750 | 4.00 |"
    assert lines[-1] == "2 x A GPU, NVLink, NCCL, median of 20, torch 2.13.0, commit 0123456789ab."


def test_torchft_has_a_column_and_a_dash_where_it_was_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = table(tmp_path, monkeypatch, [row(2, 16384, torchft=1.5), row(4, 32768)])
    assert lines[0].startswith("| GPUs | elements | e4m3, ms | bf16, ms | fp32, ms | torchft, ms |")
    assert lines[2] == "| 2 | 16,384 | 0.500 | 0.250 | 0.750 | 1.500 | 4.00 |"
    assert lines[3] == "| 4 | 32,768 | 0.500 | 0.250 | 0.750 | - | 4.00 |"
    assert lines[-1].startswith("2 and 4 x A GPU")
    assert "torchft 2026.1.1" in lines[-1]
