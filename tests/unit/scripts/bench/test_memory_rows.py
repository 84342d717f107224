"""What a GPU took of every plan on record is what the estimate says now."""

import json
from collections import Counter

import pytest

from node.tuning.memory_plan import Choice
from node.tuning.state_moves import STAYS, Moved
from scripts.bench.memory_rows import MEASURED, beyond, choice, every_way, parsed

AGAIN = Choice(recomputed=("ffn_input",), moved=("attention", "attention_output"))


@pytest.mark.parametrize("one", [Choice.AGAIN, Choice.INPUT_MOVED, AGAIN, Choice.FFN])
def test_a_choice_is_read_as_it_is_written(one: Choice) -> None:
    assert choice(str(one)) == one


def test_a_plan_is_read_as_it_is_written() -> None:
    state = "the optimizer's moments in host memory; weights of 7 of 8 blocks in host memory"
    found, moved = parsed(f"5 of 8 blocks: {AGAIN}; 1 of 8 blocks: {Choice.AGAIN}; {state}")
    assert found == Counter({AGAIN: 5, Choice.AGAIN: 1, Choice.KEPT: 2})
    assert moved == Moved(moments=1, weights=7)
    assert parsed("everything kept") == (Counter({Choice.KEPT: 8}), STAYS)
    with pytest.raises(ValueError, match="8 blocks burn"):
        parsed("8 blocks burn")


def test_no_recorded_peak_is_above_its_estimate_and_none_is_five_percent_below_it() -> None:
    rows = list(every_way(json.loads(MEASURED.read_text(encoding="utf-8"))))
    assert {row["way"] for row in rows} >= {"plan", "plan, few bits", "plain", "again", "agoq", "compact"}
    assert {row["tokens"] for row in rows} == {"2 x 4096", "1 x 32768"}
    assert beyond(rows) == []
    above = {**rows[0], "tensors_over_peak": 0.999}, {**rows[0], "tensors_over_peak": 1.06}
    assert beyond([*above, rows[0]]) == list(above)
