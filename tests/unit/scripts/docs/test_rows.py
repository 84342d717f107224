"""The table of two rows against one, from a report."""

from typing import Any

from scripts.docs.rows import parts_of, rows_of, waits_of, ways_of

LINK = {"stages": 2, "rate_mbit": 100.0, "round_trip_ms": 50.0}


def result(rows: int, steps: list[float], floor: float) -> dict[str, Any]:
    return {**LINK, "rows": rows, "step_seconds": steps, "floor_seconds": floor, "sync_bytes": 2_000_000}


MACHINE = {"commit": "0123456789abcdef", "hardware": "A  machine", "versions": {"torch": "2"}}


def test_waits_are_beside_the_usual_step() -> None:
    waits = {
        **MACHINE,
        "paced": "blocks wait",
        "stages": 2,
        "keep": "nodes",
        "snapshot_bytes": 5_000_000,
        "snapshot_every": 5,
        "usual_step_seconds": 2.0,
        "slowest_usual_step_seconds": 2.25,
        "longest_wait_for_a_snapshot_seconds": 0.125,
        "newcomers": {
            "seconds_from_arrival_to_entry": 9.0,
            "steps_meanwhile": 4,
            "wait_seconds": -0.1,
        },
    }
    words = " ".join(waits_of(waits).split())
    assert "took 0.12 s more than the usual 2.00 s" in words and "waited 0.00 s for it" in words
    assert words.endswith("2 stages; blocks wait. A machine, torch 2, commit 0123456789ab.")


def test_two_rows_stand_beside_one_with_their_floors() -> None:
    report = {
        **MACHINE,
        "microbatches": 32,
        "steps": 3,
        "paced": "blocks wait",
        "speedups": [{**LINK, "times": 1.9}],
        "results": [result(1, [2.0, 9.0, 1.0], 1.8), result(2, [1.0, 1.0, 1.0], 0.95)],
    }
    table, caption = rows_of(report).split("\n\n")
    cells = [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]
    assert cells == ["2 x 2 against 1 x 2", "100", "50", "2.00", "1.00", "1.90", "0.90", "0.95"]
    assert "2 MB a node. A machine, torch 2, commit 0123456789ab." in caption


def test_ways_stand_beside_what_they_allow() -> None:
    parts = {"parts": {"begin": 0.05, "drain": 0.4}, "least_parts": {"begin": 0.0, "drain": 0.25}}
    common = {"way": "as it is", "measured_compute_seconds": 0.9, **parts}
    report = {
        **MACHINE,
        "microbatches": 32,
        "steps": 3,
        "paced": "blocks wait",
        "runs_at_a_time": 4,
        "speedups": [{**LINK, "way": "as it is", "times": 1.6}],
        "results": [
            {**result(1, [1.6], 1.5), **common, "allowed_seconds": 1.5},
            {**result(2, [1.0], 0.8), **common, "allowed_seconds": 0.75},
            {**result(2, [1.0], 0.8), **common, "way": "another"},
        ],
    }
    table, caption = ways_of(report).split("\n\n")
    cells = [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]
    assert cells == ["as it is", "100", "50", "1.60", "1.00", "1.60", "2.00", "0.80", "0.90", "0.75"]
    assert caption.startswith("2 x 2 nodes against 1 x 2, 32 microbatches a step")
    lines = parts_of(report).splitlines()
    assert len(lines) == 4
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")] == [
        *("2 x 2", "100", "50", "0.050 (0.000)", "0.400 (0.250)")
    ]
