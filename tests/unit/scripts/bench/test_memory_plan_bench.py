"""A bench of plans that was cut goes on with what it lacks, by the times that it had."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from node.model.storage import Storage
from node.tuning.block_times import BlockTimes, PackTime
from scripts.bench.memory_plan import BESIDE, GB, Bench, measure_all, times_of

TIMES = BlockTimes(
    forward=0.006,
    backward=0.013,
    attention=0.001,
    attention_output=0.0005,
    ffn_input=0.002,
    out_rate=4e10,
    in_rate=4e10,
    stored=Storage(attention="8", offload=("attention",)),
    packing=(PackTime(kind="attention", form="8", pack=0.1, unpack=0.2),),
    measured=True,
)


class Counted(Bench):
    """Plans as the bench does; ways give their number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(torch.device("cpu"), 2)
        monkeypatch.setattr(self, "_measured", lambda config: None)
        self.done: list[tuple[int, str]] = []

    def measure(self, row: dict[str, Any], way: str) -> dict[str, Any]:
        self.done.append((row["gb"], way))
        return {"microbatch_seconds": float(len(self.done))}


def test_times_are_read_as_they_are_written() -> None:
    assert times_of(json.loads(json.dumps(asdict(TIMES)))) == TIMES
    assert times_of(None) is None


def test_what_was_cut_goes_on_and_budgets_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = []
    kept: list[str] = []
    first, ways = Counted(monkeypatch), ("budget", "plan", "again")
    cut = measure_all(first, rows, ["2 x 4096"], [16, 80], ways, lambda: kept.append(json.dumps(rows)))
    for _ in range(3):
        next(cut)
    assert first.done == [(16, "plan"), (16, "again"), (80, "plan")] and len(kept) == 3
    rows = json.loads(kept[-1])
    assert [row["plan"] == "everything kept" for row in rows] == [False, True]
    for row in rows:
        assert row["cap_bytes"] == row["gb"] * GB - BESIDE
        assert row["estimate_of_tensors"] < row["estimate_of_torch"] <= row["cap_bytes"]
    second = Counted(monkeypatch)
    assert len(list(measure_all(second, rows, ["2 x 4096"], [16, 80], ways, lambda: None))) == 3
    assert second.done == [(80, "again"), (16, "budget"), (80, "budget")]
    assert all(set(row["ways"]) == set(ways) for row in rows)
