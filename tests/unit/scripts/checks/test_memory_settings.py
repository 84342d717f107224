"""Plans of random settings: never below what a step takes; the summary counts what it says."""

import random

import pytest

from scripts.checks.memory_settings import compared, draw, summary


@pytest.mark.parametrize("seed", range(6))
def test_a_stage_never_takes_more_than_its_plan_says(seed: int) -> None:
    row = compared(*draw(random.Random(seed)))
    assert row["peak"] <= row["estimate"] <= 1.6 * row["peak"], row


def test_a_summary_counts_what_is_below_and_what_is_within_five_percent() -> None:
    rows = [
        {"estimate": estimate, "peak": 100, "most_is": kind, "solve_seconds": seconds}
        for estimate, kind, seconds in (
            (99, "passes", 0.5),
            (104, "passes", 0.1),
            (120, "passes", 0.2),
            (101, "the optimizer's step", 0.3),
        )
    ]
    found = summary(rows)
    assert found["solve_seconds"] == 0.5
    assert found["all"] == {
        "settings": 4,
        "least": 0.99,
        "median": 1.025,
        "most": 1.2,
        "within 5 %": 2,
        "below": 1,
    }
    assert found["passes"]["settings"] == 3 and found["the optimizer's step"]["below"] == 0
