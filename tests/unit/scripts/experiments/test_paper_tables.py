"""The paper's tables beside results."""

import sys
from pathlib import Path

import pytest

from node.lab.results import Results
from scripts.experiments import paper_tables
from scripts.experiments.paper_tables import tables_beside
from tests.support.lab_results import cell, results


def test_the_papers_figures_are_shown_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its links are as fast both ways, and no window of ours is set by hand."""
    found = results(
        cell("fp32/fp32", 100, 200.0),
        cell("tah/fixed-6", 100, 1000.0),
        cell("tah/fixed-6", 100, 1200.0, seed=1),
        cell("tah/fixed-6", 100, 700.0, shape="500/100"),
        cell("tah/fixed-6", 100, 600.0, window=0),
        {**cell("tah/fixed-6", 100, 500.0, shape="100 + 20 ms"), "rtt_ms": 20.0},
        cell("bf16/bf16", 500, 1800.0),
    )
    table3, *_ = tables_beside(found)
    rows = {(row[0], row[2]): dict(zip(table3.headings, row, strict=True)) for row in table3.rows}
    packed = rows["100", "tah/fixed-6"]
    ratios = packed["paper / fp32"], packed["here / fp32"], packed["of unthrottled"]
    assert ratios == ("5.39", "5.50", "0.55")
    assert packed["here, tokens/s"] == "1100 (900 to 1320)"
    assert rows["1000", "tah/fixed-6"]["here, tokens/s"] == "-"
    assert rows["500", "bf16/bf16"]["paper, tokens/s"] == "-"

    Results(tmp_path / "results.json", found).write()
    monkeypatch.setattr(sys, "argv", ["paper_tables", str(tmp_path)])
    paper_tables.main()
    shown = capsys.readouterr().out
    assert [f"table {number} of the paper" in shown for number in (3, 5, 6)] == [True] * 3
    assert "1100 (900 to 1320)" in shown


def test_the_papers_own_speedups_follow_from_its_numbers() -> None:
    tables = paper_tables.paper_tables()
    assert [table.number for table in tables] == [3, 5, 6]
    # As the paper prints them beside tables 5 and 6.
    printed = {5: (1.78, 2.35, 2.30, 2.14), 6: (1.50, 1.81, 1.73, 1.64)}
    for table in tables[1:]:
        for row, speedup in zip(table.rows, printed[table.number], strict=True):
            ours = table.tokens(row, "tah/fixed-6")
            base = table.tokens(row, "fp32/fp32")
            assert ours is not None and base is not None
            assert ours / base == pytest.approx(speedup, abs=0.006)
