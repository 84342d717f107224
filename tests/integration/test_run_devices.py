"""A node with several devices (on a CPU: processes) in a real run; it starts their processes for real."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from node.telemetry.events import NodeJoined, PlacementMade, StepDone
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_bytes
from node.tuning.memory_plan import least_stage_bytes
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, TINY, Run, Still, assert_near_undisturbed, packed, undisturbed
from tests.support.terminal import assert_never_silent, volunteer

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=12, snapshot_every=4),
    pipeline=replace(SMALL.pipeline, stages=2),
)

pytestmark = pytest.mark.timeout(240)


def workers(run: Run) -> list[int]:
    """Processes of more devices, by number."""
    found = []
    for pid in run.survivors():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"node.stage.worker" in words:
            found.append(pid)
    return found


def test_a_dead_device_is_the_nodes_death_and_the_run_goes_on(prefork: Prefork, tmp_path: Path) -> None:
    """Losses are those of an unsplit run while two devices share the stage, and after."""
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=1, steps=5)) as run:
        coordinator = run.start()
        shared = run.add_node(options=("--gpus", "2"))
        coordinator.wait_event(NodeJoined)  # so that it has stage 0, and the other one is who freezes
        run.add_node()
        other = run.wait_still()
        (worker,) = workers(run)
        os.kill(worker, signal.SIGKILL)
        assert shared.wait_exit() == 1
        other.go_on()
        # Whoever notices first: a collective on the compute thread, or the watch on the process.
        assert "the node ends too" in shared.stderr
        assert "Traceback" not in shared.stderr
        run.add_node(state_dir=run.state_dir(0))
        assert coordinator.wait_exit() == 0
        assert_near_undisturbed(coordinator, run.config)
        assert workers(run) == []


def test_a_killed_node_of_two_devices_comes_back_to_the_same_bits(prefork: Prefork, tmp_path: Path) -> None:
    """kill -9 of its leader; everything that can be is kept in few bits, and summed so over the devices.
    Steps that run again give the losses that they gave, and all are near the unsplit run's."""
    config = packed(
        replace(CONFIG, run=replace(CONFIG.run, steps=10), model=replace(TINY, ffn=256, sequence=32))
    )
    with Run(tmp_path, config, launch=prefork.popen, still=Still(stage=0, steps=7)) as run:
        coordinator = run.start()
        shared = run.add_node(options=("--gpus", "2"))
        # Bits depend on which stage it has, and stages are given out in the order in which nodes come.
        coordinator.wait_event(NodeJoined)
        run.add_node()
        run.wait_still().kill()
        assert shared.wait_exit() == -signal.SIGKILL
        run.add_node(state_dir=run.state_dir(0), options=("--gpus", "2"))
        assert coordinator.wait_exit() == 0
        # A snapshot is stored beside the steps: that of step 4 may not have been whole.
        _, after = coordinator.all(PlacementMade)
        assert after.resume_step in (0, 4)
        run.assert_quiet()
        assert [done.step for done in coordinator.all(StepDone)].count(7) == 2
        assert run.losses == pytest.approx(undisturbed(config).losses, rel=5e-3)


def test_nodes_that_cannot_take_a_stage_are_refused_and_use_no_token(
    prefork: Prefork, tmp_path: Path
) -> None:
    """Before a stage is given out, so nobody's step is aborted: sizes that devices cannot share, too little
    memory (two processes share a machine's), and devices that are not there. The one use of the token is
    still there."""
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        coordinator = run.start()
        assert coordinator.token  # its database is there
        token = run.command("token", "create", str(run.run_dir), "--uses", "1", "--json")
        assert token.wait_exit() == 0
        once = json.loads(token.lines[0])["token"]
        small = volunteer(run, prefork.popen, "Ben", "--max-memory", "0.2")
        estimated = "smallest of 2 stages"
        refused = [
            (small, 1, estimated),
            *(
                (run.add_node(once, options=options), code, line)
                for options, code, line in (
                    (("--gpus", "4", "--tensor-parallel", "4"), 1, "model.kv_heads 2"),
                    (("--gpus", "3"), 1, "3 devices"),
                    (("--gpus", "2", "--max-memory", "0.5"), 1, estimated),
                    (("--device", "cuda:99", "--gpus", "2"), 2, "--device cuda:99"),
                )
            ),
        ]
        for node, code, line in refused:
            assert node.wait_exit() == code
            (said,) = node.stderr.splitlines()
            assert line in said
        shared = refused[3][0]
        assert "this node offers 191 MiB" in small.stderr and "this node offers 238 MiB" in shared.stderr
        assert "each of 2 devices" in shared.stderr
        assert_never_silent(small)
        assert coordinator.all(PlacementMade) == []
        run.add_node(once)
        run.add_node()
        assert coordinator.wait_exit() == 0
        run.assert_undisturbed()


def test_a_node_with_little_memory_computes_blocks_again_to_the_same_bits(
    prefork: Prefork, tmp_path: Path
) -> None:
    """It is given a stage that does not fit as kept; the other node keeps everything."""
    config = replace(
        CONFIG,
        run=replace(CONFIG.run, steps=4),
        model=replace(TINY, layers=8, hidden=64, ffn=256, sequence=256),
        training=replace(CONFIG.training, microbatch=4, global_batch=16),
        pipeline=replace(CONFIG.pipeline, stages=2, window=0),
    )
    least, most = least_stage_bytes(config, 2, Devices())[0], stage_bytes(config, 2)[0]
    memory = round((least + most) / 2e9, 4)
    assert least < memory * 1e9 < most
    with Run(tmp_path, config, launch=prefork.popen) as run:
        coordinator = run.start()
        small = run.add_node(options=("--max-memory", str(memory)))
        coordinator.wait_event(NodeJoined)  # so that it has stage 0
        run.add_node()
        assert coordinator.wait_exit() == 0
        run.assert_undisturbed()
        assert any("blocks: computed again in backward" in line for line in small.lines)
