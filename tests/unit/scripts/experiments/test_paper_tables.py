"""The paper's tables beside results."""

import pytest

from scripts.experiments import paper_tables


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
