"""A node that runs out of memory during the run ends with one line; the run goes on without it."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.main import main
from node.config.schema import RunConfig
from node.display.render import SHORT_ID
from node.display.watch import PageWatch
from node.stage.out_of_memory import NOTE_FILE
from node.telemetry.events import NodeJoined, NodeLeft, PlacementMade
from node.telemetry.format import bytes_text
from node.tuning.memory import stage_bytes
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, small
from tests.support.faults import Fault, Kind, Phase
from tests.support.run_harness import SMALL, Launch, Process, Run, assert_near_undisturbed

pytestmark = pytest.mark.timeout(240)

RANK_RUNS_OUT = """
import os
import sys

if "node.stage.worker" in sys.orig_argv and not os.path.exists(MARKER):
    import torch
    from node.stage.stage_model import StageModel

    backward, calls = StageModel.backward, []

    def runs_out(*arguments):
        calls.append(1)
        if len(calls) == 9:
            open(MARKER, "w").close()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return backward(*arguments)

    StageModel.backward = runs_out
"""


def said(node: Process) -> str:
    """The one line that a node ended with."""
    assert "Traceback" not in node.stderr and "bug" not in node.stderr, node.report()
    (line,) = [line for line in node.stderr.splitlines() if line.startswith("thinwire: ")]
    return line


def test_spares_take_the_stages_of_nodes_that_ran_out(
    tmp_path: Path, prefork: Prefork, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operators read why these are gone once the run is over, too."""
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.COMMIT_APPLY)
    faults = [
        Fault(kind=Kind.MEMORY, phase=phase, stage=1, step=step) for step, phase in enumerate(phases, 3)
    ]
    count = 3 + len(faults)
    with FaultRun(tmp_path, small(steps=8), faults, gather=count, launch=prefork.popen) as run:
        run.start()
        nodes = [*run.add_nodes(3), *(run.add_spare() for _ in faults)]
        run.assert_ends_undisturbed(restart=False, codes=(0, 1))
        assert sorted(node.wait_exit() for node in nodes) == [0, 0, 0, 1, 1, 1]
        estimate = bytes_text(stage_bytes(run.config, 3)[1])
        ran_out = "cpu ran out of memory at stage 1 of 3"
        placements, departures = run.all(PlacementMade), run.all(NodeLeft)
        assert len(departures) == len(faults)
        for before, after, left in zip(placements, placements[1:], departures, strict=False):
            assert before.nodes[1] == left.node_id not in after.nodes
            (victim,) = [node for number, node in enumerate(nodes) if run.node_id(number) == left.node_id]
            assert ran_out in said(victim) and estimate in said(victim)
            assert ran_out in left.reason and estimate in left.reason
            assert "and this node ends" not in left.reason and "pipeline.window" not in left.reason
        assert main(["status", str(run.run_dir)]) == 0
        shown = capsys.readouterr().out
        assert all(f"{left.node_id[:SHORT_ID]}: {left.reason}" in shown for left in departures)
        page = run.command("dashboard", str(run.run_dir), "--listen", "127.0.0.1:0")
        url = page.wait_line(lambda line: line.startswith("page at ")).split()[2]
        seen = [(event.level, event.text) for event in PageWatch(url).view().events if event.kind == "left"]
        assert seen == [("warning", f"left: {left.node_id}: {left.reason}") for left in departures]
        page.interrupt()
        assert page.wait_exit() == 0


def test_it_gets_that_stage_again_only_with_recomputed_blocks(
    tmp_path: Path, prefork: Prefork, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service manager starts it again; it offers less than its stage took, which is the least of all. While
    it is away, its operator reads why."""
    fault = Fault(kind=Kind.MEMORY, phase=Phase.FORWARD, stage=1, step=3)
    with FaultRun(tmp_path, small(), [fault], launch=prefork.popen) as run:
        run.start()
        nodes = run.add_nodes(3)
        needs = stage_bytes(run.config, 3)
        assert min(needs) == needs[1]
        assert run.tend(until=lambda event: isinstance(event, NodeLeft)) is None
        (left,) = run.all(NodeLeft)
        assert "cpu ran out of memory at stage 1 of 3" in left.reason
        assert main(["status", str(run.run_dir)]) == 0
        assert f"gone      {left.node_id[:SHORT_ID]}: {left.reason}" in capsys.readouterr().out
        (number,) = [number for number in range(3) if run.node_id(number) == left.node_id]
        assert nodes[number].wait_exit() == 1
        assert json.loads((run.state_dir(number) / NOTE_FILE).read_bytes())["need"] == needs[1]
        again = run.add_node(state_dir=run.state_dir(number))
        assert run.tend(restart=False) == 0
        assert again.wait_exit() == 0
        assert "offers less" in again.stderr
        assert any("1 of 1 blocks: computed again" in line for line in again.lines), again.report()
        assert run.all(PlacementMade)[-1].nodes[1] == left.node_id
        run.assert_undisturbed(codes=(0, 1))


class RankRunsOut(Run):
    """Once in the run, the process of a node's second device runs out of memory."""

    def __init__(self, directory: Path, config: RunConfig, *, launch: Launch) -> None:
        super().__init__(directory, config, launch=launch)
        self._site = directory / "site"
        self._site.mkdir()
        # Once, before any process is there that could read it half written.
        program = RANK_RUNS_OUT.replace("MARKER", repr(str(directory / "ran-out")))
        (self._site / "sitecustomize.py").write_text(program, encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        inherited = super().environment
        return {**inherited, "PYTHONPATH": f"{self._site}{os.pathsep}{inherited['PYTHONPATH']}"}


def test_a_rank_that_ran_out_of_memory_is_one_line_of_its_node(tmp_path: Path, prefork: Prefork) -> None:
    config = replace(
        SMALL,
        run=replace(SMALL.run, steps=8, snapshot_every=4),
        pipeline=replace(SMALL.pipeline, stages=2),
    )
    with RankRunsOut(tmp_path, config, launch=prefork.popen) as run:
        coordinator = run.start()
        shared = run.add_node(options=("--gpus", "2"))
        coordinator.wait_event(NodeJoined)  # so that it has stage 0
        run.add_node()
        assert shared.wait_exit() == 1
        line = said(shared)
        assert "cpu ran out of memory at stage 0 of 2" in line
        assert "Connection closed by peer" not in shared.stderr
        left = coordinator.wait_event(NodeLeft)
        assert "cpu ran out of memory at stage 0 of 2" in left.reason
        # On one device: it offered too much as two.
        run.add_node(state_dir=run.state_dir(0))
        assert coordinator.wait_exit() == 0
        assert_near_undisturbed(coordinator, run.config)
