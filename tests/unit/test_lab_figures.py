"""From steps and counters to figures, tables and plots."""

import builtins
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from node.lab.calibration import Calibration, Measured
from node.lab.measure import (
    Compute,
    PhaseSteps,
    cell_figures,
    cell_floor,
    compute_times,
    floor_figures,
)
from node.lab.network import WireBytes
from node.lab.plots import draw
from node.lab.results import FORMAT, Results, read_results
from node.lab.shape import PAYLOAD_SHARE, Shape, uniform
from node.lab.table import all_tables, paper_tables, provenance, tables_text
from node.lab.topology import Wire, lay_out
from node.telemetry.clock import TimeKind
from node.telemetry.events import FlowCost, LinkCost, StageCost, StepCosts
from wire.errors import UserError

PAPER = Path(__file__).parents[2] / "node" / "lab" / "paper_tables.toml"
MEGABYTE = 1_000_000


def costs(step: int, seconds: float, busy: float = 1.0) -> StepCosts:
    """Two stages: a megabyte out and half of one back, in 4 microbatches."""

    def stage(number: int) -> StageCost:
        spent = dict.fromkeys((kind.value for kind in TimeKind), 0.0)
        spent |= {"forward": 0.2 * busy, "backward": 0.4 * busy, "encode": 0.1 * busy, "decode": 0.1 * busy}
        spent |= {"optimizer": 0.2 * busy, "wait-downstream": seconds - busy}
        return StageCost(stage=number, node_id=f"n{number}", wall_seconds=seconds, seconds=spent)

    def link(source: int, target: int, direction: str, size: int) -> LinkCost:
        flow = FlowCost(direction=direction, codec="tah", bytes=size, elements=2 * size)
        return LinkCost(
            source=source,
            target=target,
            bytes=size + 1000,
            flows=(flow,),
            busy_seconds=0.0,
            capacity=0.0,
            round_trip_seconds=0.0,
            retransmits=0,
            rejects=0,
            queued_bytes=0,
        )

    links = (link(0, 1, "activation", MEGABYTE), link(1, 0, "gradient", MEGABYTE // 2))
    return StepCosts(step=step, seconds=seconds, aborted=False, stages=(stage(0), stage(1)), links=links)


def phase(
    *seconds: float, wires: tuple[WireBytes, ...] = (WireBytes(0, 0),), busy: float = 1.0
) -> PhaseSteps:
    steps = tuple(costs(number, value, busy) for number, value in enumerate(seconds))
    return PhaseSteps(costs=steps, wires=wires, seconds=sum(seconds))


def wires(topology: str = "links") -> tuple[Wire, ...]:
    return lay_out(2, ((0, 1),), topology=topology, relay=False).wires


def calibration(shape: Shape) -> Calibration:
    found = [
        Measured(
            sender=sender,
            receiver=1 - sender,
            asked_mbit=shape.links[0].up_mbit,
            payload_mbit=shape.links[0].up_mbit * PAYLOAD_SHARE,
            asked_rtt_ms=shape.rtt_ms,
            rtt_ms=shape.rtt_ms,
            seconds=1.5,
        )
        for sender in (0, 1)
    ]
    return Calibration(label=shape.label, attempts=1, congestion_control="bbr", links=tuple(found))


def test_figures_are_those_of_the_counters_and_the_steps() -> None:
    shape = uniform("8", 0.0, 1)
    counted = (WireBytes(3 * 1_100_000, 3 * 550_000),)
    figures = cell_figures(
        phase(2.0, 4.0, 3.0, wires=counted), shape, wires(), tokens_per_step=1200, losses=[1]
    )
    assert figures["step_seconds"] == {"median": 3.0, "least": 2.0, "most": 4.0}
    assert figures["tokens_per_second"] == {"median": 400.0, "least": 300.0, "most": 600.0}
    assert figures["idle"] == pytest.approx([(1 / 2 + 3 / 4 + 2 / 3) / 3] * 2)
    assert figures["bits_forward"] == pytest.approx(4.0)
    up, down = figures["wires"]
    assert (up["sender"], up["own_bytes"], up["wire_bytes"]) == (0, 3 * 1_001_000, 3_300_000)
    assert up["overhead"] == pytest.approx(1_100_000 / 1_001_000 - 1)
    assert up["use"] == pytest.approx(3_300_000 * 8e-6 / 9 / 8)
    assert down["use"] == pytest.approx(up["use"] / 2)


def test_an_interface_carries_what_its_node_sends_to_all() -> None:
    shape = uniform("8/4", 0.0, 2)
    counted = (WireBytes(1_100_000, 600_000), WireBytes(600_000, 1_100_000))
    figures = cell_figures(
        phase(2.0, wires=counted), shape, wires("interfaces"), tokens_per_step=1, losses=[1]
    )
    own = [(wire["wire"], wire["own_bytes"]) for wire in figures["wires"]]
    assert own == [
        ("interface of 0", 1_001_000),
        ("interface of 0", 501_000),
        ("interface of 1", 501_000),
        ("interface of 1", 1_001_000),
    ]


def test_compute_is_the_least_that_was_seen_a_microbatch() -> None:
    slow, fast = costs(0, 3.0, busy=2.0), costs(1, 2.0, busy=1.0)
    compute = compute_times(PhaseSteps(costs=(slow, fast), wires=(), seconds=5.0), microbatches=4)
    assert compute.forward == pytest.approx((0.075, 0.075))
    assert compute.backward == pytest.approx((0.125, 0.125))
    assert compute.after == pytest.approx(0.2)


def test_the_floor_of_a_cell_is_its_bytes_at_the_measured_rate() -> None:
    shape = uniform("8", 0.0, 1)
    measured = phase(3.0)
    compute = Compute(forward=(0.001, 0.001), backward=(0.001, 0.001), after=0.25)
    floor = cell_floor(measured, compute, shape, wires(), calibration(shape), microbatches=4, chunks=1)
    seconds = MEGABYTE / (1e6 * PAYLOAD_SHARE)
    # A megabyte goes out; the last gradient comes back; two forwards and two backwards cannot be hidden.
    assert floor.seconds == pytest.approx(seconds + seconds / 8 + 0.004 + 0.25)
    figures = floor_figures(floor, measured, compute)
    assert figures["binds"] == "link 0 to 1"
    assert figures["share"] == pytest.approx(floor.seconds / 3.0)
    assert json.loads(json.dumps(figures))["compute"] == {
        **asdict(compute),
        "forward": [0.001] * 2,
        "backward": [0.001] * 2,
    }


def test_the_floor_counts_the_way_of_a_shared_interface_once() -> None:
    shape = uniform("8", 40.0, 2)
    compute = Compute(forward=(0.0, 0.0), backward=(0.0, 0.0), after=0.0)
    floor = cell_floor(
        phase(3.0), compute, shape, wires("interfaces"), calibration(shape), microbatches=4, chunks=1
    )
    seconds = MEGABYTE / (1e6 * PAYLOAD_SHARE)
    # One round trip of 40 ms: out with the last activation, back with the last gradient.
    assert floor.seconds == pytest.approx(seconds + seconds / 8 + 0.040)


# ---- results, tables, plots


def cell(codecs: str, mbit: float, tokens: float, **key: Any) -> dict[str, Any]:
    forward, backward = codecs.split("/")
    spread = {"median": tokens, "least": 0.9 * tokens, "most": 1.1 * tokens}
    return {
        "key": {
            "forward_codec": forward,
            "backward_codec": backward,
            "microbatch": 1,
            "window": "auto",
            "seed": 0,
            "shape": f"{mbit:g}",
            **key,
        },
        "mbit": mbit,
        "rtt_ms": 0.0,
        "tokens_per_second": spread,
        "step_seconds": {"median": 1000 / tokens, "least": 1.0, "most": 1.0},
        "bits_forward": 4.41,
        "bits_backward": 6.25,
        "wires": [{"use": 0.5}, {"use": 0.97}],
        "floor": {"share": 0.93},
        "curve": [[step, 0.5, 5.0 / (step + 1)] for step in range(20)],
    }


def results(*cells: dict[str, Any]) -> dict[str, Any]:
    shape = uniform("100", 0.0, 1)
    return {
        "format": FORMAT,
        "profile": "test",
        "profile_sha256": "0",
        "machine": {
            "commit": "0123456789abcdef with changes",
            "kernel": "6.1",
            "processor": "a processor",
            "cores": 2,
            "gpus": [],
            "versions": {"torch": "2.11"},
        },
        "network": {"topology": "links", "qdisc": "tbf", "delay_method": "none", "congestion_control": "bbr"},
        "model": {"family": "gpt2", "layers": 48, "hidden": 1600, "sequence": 1024},
        "training": {"global_batch": 32},
        "stages": 4,
        "device": "cpu",
        "seeds": [0],
        "calibrations": [calibration(shape).as_json()],
        "runs": [{}],
        "cells": list(cells),
    }


def test_ratios_are_over_the_same_setting_and_shares_are_told() -> None:
    found = results(
        cell("fp32/fp32", 100, 200.0),
        cell("tah/fixed-6", 100, 1000.0),
        cell("tah/fixed-6", 100, 1200.0, seed=1),
        cell("fp32/fp32", 500, 900.0),
        cell("bf16/bf16", 500, 1800.0),
    )
    measured, table3, *_ = all_tables([found])
    rows = {(row[0], row[3]): dict(zip(measured.headings, row, strict=True)) for row in measured.rows}
    assert len(rows) == 4
    tah = rows["100", "tah/fixed-6"]
    assert tah["tokens/s"] == "1100 (900 to 1320)"
    assert (tah["/ fp32"], tah["/ bf16"], tah["of the floor"], tah["link use"]) == (
        "5.50",
        "-",
        "0.93",
        "97 %",
    )
    assert rows["500", "bf16/bf16"]["/ fp32"] == "2.00"
    ours = {(row[0], row[2]): dict(zip(table3.headings, row, strict=True)) for row in table3.rows}
    assert ours["100", "tah/fixed-6"]["paper / fp32"] == "5.39"
    assert ours["100", "tah/fixed-6"]["here / fp32"] == "5.50"
    assert ours["1000", "tah/fixed-6"]["here, tokens/s"] == "-"
    assert ours["500", "bf16/bf16"]["paper, tokens/s"] == "-"


def test_the_papers_own_speedups_follow_from_its_numbers() -> None:
    _, tables = paper_tables()
    assert [table.number for table in tables] == [3, 5, 6]
    # As the paper prints them beside tables 5 and 6.
    printed = {5: (1.78, 2.35, 2.30, 2.14), 6: (1.50, 1.81, 1.73, 1.64)}
    for table in tables[1:]:
        for row, speedup in zip(table.rows, printed[table.number], strict=True):
            ours = table.tokens(row, "tah/fixed-6")
            base = table.tokens(row, "fp32/fp32")
            assert ours is not None and base is not None
            assert ours / base == pytest.approx(speedup, abs=0.006)


def test_the_text_says_where_figures_come_from() -> None:
    text = tables_text([results(cell("fp32/fp32", 100, 200.0))])
    line = text.splitlines()[-1]
    assert line == provenance(results())
    for words in (
        "tbf",
        "bbr",
        "kernel 6.1",
        "no delay",
        "1 runs, 1 seed",
        "commit 0123456789ab with changes",
    ):
        assert words in line


def test_results_are_written_whole_and_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, results(cell("tah/fixed-6", 100, 1.0))).write()
    assert read_results(path)["cells"][0]["key"]["forward_codec"] == "tah"
    assert not path.with_suffix(".json.partial").exists()
    with pytest.raises(ValueError):
        Results(path, {"cells": [math.nan]}).write()
    assert read_results(path)["profile"] == "test"
    path.write_text('{"format": "something else"}')
    with pytest.raises(UserError, match="holds no laboratory results"):
        read_results(path)
    with pytest.raises(UserError, match="no such results file"):
        read_results(tmp_path / "none.json")


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results(
        cell("fp32/fp32", 100, 200.0),
        cell("tah/fixed-6", 100, 1000.0),
        cell("tah/fixed-6", 500, 1200.0),
        {**cell("fp32/fp32", 100, 150.0, shape="100 + 20 ms"), "rtt_ms": 20.0, "curve": [[0, 1.0, 5.0]]},
    )
    files = draw([found], tmp_path)
    assert {path.name for path in files} == {
        "tokens-microbatch-1-window-auto.svg",
        "tokens-microbatch-1-window-auto-round-trip-20-ms.svg",
        "use-microbatch-1-window-auto.svg",
        "use-microbatch-1-window-auto-round-trip-20-ms.svg",
        "loss-microbatch-1-window-auto-100-Mbit-s.svg",
        "loss-microbatch-1-window-auto-500-Mbit-s.svg",
    }
    text = (tmp_path / "tokens-microbatch-1-window-auto.svg").read_text()
    assert "tah/fixed-6" in text and "tokens/s" in text and "Mbit/s" in text
    with pytest.raises(UserError, match="nothing to draw"):
        draw([results()], tmp_path)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'thinwire\[lab\]'"):
        draw([results(cell("fp32/fp32", 100, 200.0))], tmp_path)
    assert list(tmp_path.iterdir()) == []
