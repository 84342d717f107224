"""The table of the cost of packing: rows of a stage beside packing, if they were measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import packing_overhead as bench
from scripts.docs import codecs

MACHINE = {
    "commit": "0123456789abcdef",
    "hardware": "A GPU",
    "python": "3.12.3",
    "torch": "2.13.0",
    "triton": "3.6.0",
    "runs": 3,
}
TIMES = {"encode": 100e-6, "decode": 25e-6, "encode_wall": 300e-6, "decode_wall": 200e-6}
PACKING = {"float32": {name: TIMES for name in (bench.FORWARD, *bench.BACKWARD)}}
STAGE = [0.049, 0.050, 0.052]


def table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: list[dict[str, Any]], *without: str
) -> list[str]:
    measured = bench.measurements(STAGE, PACKING, together)
    report = {key: value for key, value in (MACHINE | measured).items() if key not in without}
    path = tmp_path / "packing_overhead.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setattr(codecs, "PACKING_OVERHEAD", path)
    return codecs.packing_overhead().splitlines()


def test_without_turns_beside_packing_there_is_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = table(tmp_path, monkeypatch, [], "together")
    assert lines == table(tmp_path, monkeypatch, [])
    assert lines[2] == "| float32 | `tah` | `fixed-6` | 250 | 0.50 % | 1000 | 2.00 % |"
    assert len(lines) == 2 + len(bench.BACKWARD) + 2
    assert "forward and backward of a stage take 50.0 ms." in lines[-1]
    assert lines[-1].endswith("median of 3 runs, torch 2.13.0, Triton 3.6.0, commit 0123456789ab.")


def test_times_beside_packing_are_shown_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One turn is slow for another's sake: the share is the median of the pairs', not of the medians.
    turns = [(0.050, 0.051), (0.100, 0.103), (0.040, 0.044)]
    together = [bench.together_row(names, turns) for names in bench.TOGETHER]
    lines = table(tmp_path, monkeypatch, together)
    alone = table(tmp_path, monkeypatch, [])
    assert lines[: len(alone)] == alone and lines[len(alone)] == ""
    below = lines[len(alone) + 1 :]
    assert below[0] == (
        "| activations | gradients | the stage alone, ms | beside packing, ms | takes longer |"
    )
    assert below[2] == "| `tah` | `fixed-6` | 50.00 | 51.00 | +3.00 % |"
    assert below[4] == "| `trellis-4.41` | `fixed-8` | 50.00 | 51.00 | +3.00 % |"
    assert len(below) == 2 + len(bench.TOGETHER) + 2
    assert "medians of 3 turns each" in below[-1]


def test_a_stage_that_packing_does_not_slow_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bench.together_row(("tah", "fixed-8"), [(0.050, 0.04995)])
    lines = table(tmp_path, monkeypatch, [row])
    assert "| `tah` | `fixed-8` | 50.00 | 49.95 | -0.10 % |" in lines
