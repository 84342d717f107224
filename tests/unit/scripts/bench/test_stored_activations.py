"""What scripts/bench/stored_activations.py makes of a report that is there."""

import json
from pathlib import Path
from typing import Any

from scripts.bench.stored_activations import earlier_rows, left


def row(shape: str, tokens: int, peak: int) -> dict[str, Any]:
    return {"shape": shape, "tokens": tokens, "way": "bf16", "peak_bytes": peak}


def test_shapes_that_were_not_measured_again_keep_their_rows_and_commit(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert earlier_rows(path) == []
    older = {**row("a", 65536, 3), "commit": "aaaa"}
    report = {"commit": "bbbb", "rows": [row("a", 8192, 1), row("a", 16384, 2), older]}
    path.write_text(json.dumps(report), encoding="utf-8")
    kept = left(earlier_rows(path), [row("a", 8192, 4)])
    assert kept == [{**row("a", 16384, 2), "commit": "bbbb"}, older]
