"""A stage over several processes of a node, on CPUs by gloo, against the stage on one device."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fp8.reference import Fp8Gradient, unpack_gradient
from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.model.shard_shapes import check_sizes
from node.model.units import unit_names
from node.run_file.loader import to_json
from node.stage import processes
from node.stage.group import StageCompute
from node.stage.processes import DeviceGroup, devices
from node.stage.stage_model import StageModel
from node.stage.watchdog import StuckError
from tests.support.device_groups import CPU, closed_at_last, leading, tokens
from tests.support.fault_prefork import Forked, Prefork
from wire.errors import DeviceLostError, RunError, UserError

VOCAB = 64
CONFIG = RunConfig(
    run=RunSection(steps=10, seed=4),
    model=ModelSection(layers=3, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=256, sequence=16, tied=True),
    training=TrainingSection(global_batch=8, microbatch=4, lr=1e-2, warmup_steps=0),
    pipeline=PipelineSection(stages=3, head="last"),
)
HEAD_FIRST = replace(CONFIG, pipeline=replace(CONFIG.pipeline, head="first"))
PACKED = replace(CONFIG, training=replace(CONFIG.training, gradients="fp8", moments="fp8"))

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("forked_workers")]


def run_step(stages: list[StageModel], step: int) -> tuple[float, dict[str, float]]:
    """One step through the stages, in order and back, wherever the head is."""
    head, chunk = (stages[-1], 0) if stages[0].config.pipeline.head == "last" else (stages[0], 1)
    for stage in stages:
        stage.begin_step()
    total = 0.0
    for microbatch in range(2):
        x, labels = tokens(step, microbatch, VOCAB)
        for stage in stages[: -1 if chunk == 0 else None]:
            x = stage.forward(0, microbatch, x)
        total += float(head.forward(chunk, microbatch, x, labels))
        gradient: Tensor | None = head.backward(1, microbatch, None) if chunk == 1 else None
        for stage in reversed(stages):
            gradient = stage.backward(0, microbatch, gradient)
        assert gradient is None
    for stage in stages:
        stage.finish_step()
    shared = stages[0].tied_gradient("embed") + head.tied_gradient("head")
    stages[0].put_tied_gradient("embed", shared)
    head.put_tied_gradient("head", shared)
    norms = {unit: norm for stage in stages for unit, norm in stage.optimizer.squared_norms().items()}
    for stage in stages:
        stage.apply(1e-2, 0.5)
    return total, norms


def pipeline(config: RunConfig, middle: StageModel | None = None) -> list[StageModel]:
    """Three stages; one of them may be given."""
    stages = [StageModel(config, CPU) for _ in range(3)]
    if middle is not None:
        stages[1] = middle
    for index, stage in enumerate(stages):
        stage.build(index, 3)
    return stages


@pytest.mark.parametrize(
    ("place", "config"),
    [(0, PACKED), (1, CONFIG), (2, CONFIG), (0, HEAD_FIRST)],
    ids=["0-fp8", "1-float32", "2-float32", "0-head-first"],
)
def test_two_ranks_do_as_one_device(place: int, config: RunConfig) -> None:
    alone = pipeline(config)
    expected = [run_step(alone, step) for step in range(3)]
    with leading(config, 2) as leader:
        shared = pipeline(config)
        shared[place] = leader
        leader.build(place, 3)
        found = [run_step(shared, step) for step in range(3)]
        state = leader.optimizer.unit_state("block.0001") if place == 1 else {}
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-6)
    # In e4m3 both ranks' gradients are rounded before they are added; AdamW's first steps make much of it.
    assert found[0][1] == pytest.approx(expected[0][1], rel=1e-4 if config is not PACKED else 0.06)
    for (loss, norms), (one_loss, one_norms) in zip(found, expected, strict=True):
        assert loss == pytest.approx(one_loss, rel=1e-5 if config is not PACKED else 0.02)
        if config is not PACKED:
            assert norms == pytest.approx(one_norms, rel=1e-3)
    if config is CONFIG and state:
        whole = alone[1].optimizer.unit_state("block.0001")
        for name, tensor in whole.items():
            assert torch.allclose(state[name], tensor, rtol=1e-3, atol=1e-6), name


def test_four_ranks_take_a_row_each_and_stay_equal() -> None:
    """A rank that went its own way would show in the next step's loss."""
    alone = pipeline(CONFIG)
    with leading(CONFIG, 4) as leader:
        shared = pipeline(CONFIG, leader)
        for step in range(4):
            assert run_step(shared, step)[0] == pytest.approx(run_step(alone, step)[0], rel=1e-5)


def test_a_restored_state_reaches_every_rank_and_an_unfinished_step_leaves_nothing() -> None:
    alone = pipeline(CONFIG)
    run_step(alone, 0)
    saved = {unit: alone[1].optimizer.unit_state(unit) for unit in alone[1].optimizer.units}
    with leading(CONFIG, 2) as leader:
        shared = pipeline(CONFIG, leader)
        for stage, twin in zip((shared[0], shared[2]), (alone[0], alone[2]), strict=True):
            for unit in stage.optimizer.units:
                stage.load_unit_state(unit, twin.optimizer.unit_state(unit))
        x, _ = tokens(9, 0, VOCAB)
        leader.begin_step()
        leader.forward(0, 0, shared[0].forward(0, 0, x))
        for unit, state in saved.items():
            leader.load_unit_state(unit, state)
        assert run_step(shared, 1)[0] == pytest.approx(run_step(alone, 1)[0], rel=1e-5)


@pytest.mark.parametrize("global_batch", [8, 80], ids=["to nearest", "stochastic"])
def test_a_step_that_breaks_off_after_its_last_backward_is_in_no_other(global_batch: int) -> None:
    """Its gradients are already between the ranks. Both ranks go on, or a later loss would show it."""
    config = replace(PACKED, training=replace(PACKED.training, global_batch=global_batch))

    def half(leader: StageModel, seed: int) -> None:
        """A step's passes up to the last backward, on other texts for other seeds."""
        leader.begin_step()
        for microbatch in range(config.microbatches):
            generator = torch.Generator().manual_seed(seed + microbatch)
            leader.forward(0, microbatch, torch.randn(4, 16, 32, generator=generator))
            leader.backward(0, microbatch, torch.randn(4, 16, 32, generator=generator))

    found = []
    for aborted in (0, 2):
        with leading(config, 2) as leader:
            leader.build(1, 3)
            for attempt in range(aborted):
                half(leader, 1000 * (attempt + 1))
            for step in range(2):
                half(leader, 100_000 * step)
                leader.finish_step()
                norms = leader.squared_norms()
                leader.apply(1e-2, 0.5)
            found.append((norms, leader.unit_state("block.0001")))
    for norms, state in found[1:]:
        assert norms == found[0][0]
        assert all(torch.equal(state[name], tensor) for name, tensor in found[0][1].items())


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_ranks_sum_gradients_of_bfloat16_weights_in_float32(tensor_parallel: int) -> None:
    training = replace(CONFIG.training, precision="bfloat16", weights="bfloat16", moments="fp8")
    model = replace(CONFIG.model, kv_heads=2, hidden=256, ffn=256)
    config = replace(CONFIG, training=training, model=model)

    def gradients(stage: StageModel) -> dict[str, float]:
        stage.build(1, 3)
        stage.begin_step()
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(microbatch)
            stage.forward(0, microbatch, torch.randn(4, 16, 256, generator=generator))
            stage.backward(0, microbatch, torch.randn(4, 16, 256, generator=generator))
        stage.finish_step()
        kept = [stage.optimizer.gradients.get(parameter) for parameter in stage.optimizer.parameters]
        assert all(gradient.dtype == torch.float32 for gradient in kept)
        # Sums that bfloat16 does not hold.
        assert all(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in kept)
        return stage.squared_norms()

    with leading(config, 2, tensor_parallel) as leader:
        assert gradients(leader) == pytest.approx(gradients(StageModel(config, CPU)), rel=5e-3)


def broken_off(group: DeviceGroup, work: Callable[[], object]) -> None:
    """Run `work`, during which a process of the group ends, as a node does: in a thread, while it watches.

    A collective with the ended process fails in one line, or never returns: gloo forgets a message that it
    sends after the process has ended and before it has seen that. `watch` ends the node then.
    """
    failed: Future[BaseException | None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # `failed` carries it to the test
            failed.set_result(error)
        else:
            failed.set_result(None)

    threading.Thread(target=run, name="compute", daemon=True).start()
    with pytest.raises(StuckError, match=r"\(rank 1\) ended with exit code"):
        asyncio.run(asyncio.wait_for(group.watch(), 120))
    with contextlib.suppress(TimeoutError):
        error = failed.result(2.0)
        assert isinstance(error, DeviceLostError), error
        assert "another device" in str(error)


def open_sockets() -> int:
    """How many sockets this process has."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(str(descriptor.readlink()))
    return sum(name.startswith("socket:") for name in names)


def test_a_dead_rank_is_reported() -> None:
    with closed_at_last(DeviceGroup((CPU, CPU), threads=1)) as group:
        leader = group.start(CONFIG)
        leader.build(1, 3)
        (worker,) = group._workers
        before = open_sockets()
        worker.kill()
        worker.wait()
        assert group.lost()
        # Once gloo has seen the end, a collective fails at once.
        while open_sockets() >= before:
            time.sleep(0.01)
        with pytest.raises(DeviceLostError, match="another device"):
            leader.begin_step()
        group.close()
    # Nothing is left in this process that a next group would run into.
    with leading(CONFIG, 2) as leader:
        leader.build(1, 3)


LEADER = """
import sys
import time
from pathlib import Path

import torch

from node.run_file.loader import from_json
from node.model.shard_shapes import check_sizes
from node.model.units import unit_names
from node.stage import processes
from node.stage.group import Leader
from node.stage.ranks import Ranks

leader = Leader(from_json(sys.stdin.readline()), Ranks(0, 2, torch.device("cpu"), Path(sys.argv[1])))
leader.build(1, 3)
print("built", flush=True)
sys.stdin.read()
"""


@contextmanager
def following(prefork: Prefork, folder: Path) -> Iterator[tuple[Forked, Forked]]:
    """A leader and its follower, which waits for a command; it prints to `folder`/said."""
    (folder / "leader.py").write_text(LEADER)
    options = {"rank": 1, "count": 2, "tensor-parallel": 1, "device": "cpu", "threads": 1, "most-bytes": 0}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    pipe = subprocess.PIPE
    with (folder / "said").open("wb") as said:
        leader = prefork.popen(
            [sys.executable, str(folder / "leader.py"), str(folder / "meet")],
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        follower = prefork.popen(
            [sys.executable, "-m", "node.stage.worker", *words, "--meet", str(folder / "meet")],
            stdin=pipe,
            stdout=said,
            stderr=said,
            text=True,
        )
    try:
        for child in (leader, follower):
            assert child.stdin is not None
            child.stdin.write(to_json(CONFIG) + "\n")
            child.stdin.flush()
        assert leader.stdout is not None and leader.stdout.readline() == "built\n"
        yield leader, follower
    finally:
        for child in (leader, follower):
            child.kill()
            child.wait()
            for end in (child.stdin, child.stdout):
                if end is not None:
                    end.close()


def test_a_follower_is_silent_when_its_node_is_gone(prefork: Prefork, tmp_path: Path) -> None:
    with following(prefork, tmp_path) as (leader, follower):
        assert follower.stdin is not None
        # Frozen meanwhile, it learns both at once, however busy this machine is.
        follower.send_signal(signal.SIGSTOP)
        leader.kill()
        leader.wait()
        follower.stdin.close()
        follower.send_signal(signal.SIGCONT)
        assert follower.wait(120) == 1
        assert (tmp_path / "said").read_text() == ""


def test_a_follower_reports_its_own_failure_in_one_line(prefork: Prefork, tmp_path: Path) -> None:
    with following(prefork, tmp_path) as (leader, follower):
        leader.kill()
        assert follower.wait(120) == 1
        (line,) = (tmp_path / "said").read_text().splitlines()
        assert line.startswith("thinwire: error: rank 1 (cpu): the process of another device")


def test_a_rank_that_ends_before_the_meeting_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `start` watches in this test, so it must notice the end."""

    def ends(words: list[str], **settings: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"], **settings)

    with closed_at_last(DeviceGroup((CPU,) * 4, threads=1)) as group:
        with monkeypatch.context() as patch:
            patch.setattr(processes.subprocess, "Popen", ends)
            early = r"cpu \(rank [123]\) ended with exit code 3 before all"
            with pytest.raises(DeviceLostError, match=early):
                group.start(CONFIG)
        assert group.lost()
        group.close()
    # What was left waiting is in nobody's way.
    with leading(CONFIG, 2) as leader:
        leader.build(1, 3)


RUNS_OUT = """
import sys
import torch
from node.stage import worker
from node.stage.group import StageCompute
from node.stage.stage_model import StageModel
from node.stage.watchdog import StuckError

def {method}(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

StageModel.{method} = {method}
sys.exit(worker.main())
"""


@pytest.mark.parametrize("method", ["build", "forward", "backward", "apply"])
def test_a_rank_that_runs_out_of_memory_leaves_its_node_a_note(
    method: str,
    prefork: Prefork,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And says nothing itself: no traceback beside the node's one line."""
    script = tmp_path / "runs_out.py"
    script.write_text(RUNS_OUT.format(method=method))

    def runs_out(words: list[str], **settings: Any) -> Forked:
        return prefork.popen([words[0], str(script), *words[3:]], **settings)

    with closed_at_last(DeviceGroup((CPU, CPU), threads=1)) as group:
        with monkeypatch.context() as patch:
            patch.setattr(processes.subprocess, "Popen", runs_out)
            leader = group.start(CONFIG)
        assert group.exhausted() is None

        def step() -> None:
            run_step(pipeline(CONFIG, leader), 0)
            # A command is sent before it is known that nobody hears it.
            while True:
                leader.begin_step()

        broken_off(group, step)
        # The note is there before the process is seen to be gone.
        found = group.exhausted()
        assert found is not None and found[0] == CPU and found[1].startswith("the machine has ")
        group.close(broken=True)
        assert capfd.readouterr().err == ""
        assert group.exhausted() is None


def test_a_leader_that_breaks_off_takes_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for what it was told to expect, and a word of parting would wait for it."""
    with closed_at_last(DeviceGroup((CPU, CPU), threads=1)) as group:
        leader = group.start(CONFIG)
        leader.build(1, 3)
        with monkeypatch.context() as patch:
            patch.setattr(leader._ranks, "scatter", runs_out)
            with pytest.raises(torch.OutOfMemoryError):
                leader.forward(0, 0, torch.zeros(4, 16, 32))
        (worker,) = group._workers
        assert worker.poll() is None
        group.close(broken=True)
        assert worker.returncode == -signal.SIGKILL
    # Nothing is left in this process that a next group would run into.
    with leading(CONFIG, 2) as leader:
        leader.build(1, 3)


def runs_out(*_: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_microbatches_that_cannot_be_shared_are_refused_before_anything_starts() -> None:
    with pytest.raises(RunError, match="3 devices cannot share microbatches of 4"):
        DeviceGroup((CPU,) * 3, threads=1).start(CONFIG)


def test_devices_that_are_not_there_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"model {device.index}")
    with pytest.raises(UserError, match=r"--gpus 3 from cuda:0 needs 3 GPUs"):
        devices(torch.device("cuda"), 3)
    with pytest.raises(UserError, match=r"--gpus 2 from cuda:1 needs 3 GPUs"):
        devices(torch.device("cuda:1"), 2)
    with pytest.raises(UserError, match="unlike GPUs"):
        devices(torch.device("cuda"), 2)
    with pytest.raises(UserError, match="at least 1"):
        devices(torch.device("cuda"), 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one model")
    assert devices(torch.device("cuda"), 2) == (torch.device("cuda:0"), torch.device("cuda:1"))


def grouped_step(stage: StageCompute, units: tuple[str, ...], step: int) -> tuple[float, dict[str, float]]:
    """One step of a whole model with two gradient groups of a microbatch each, summed without a codec."""
    stage.begin_step()
    total, sums = 0.0, {}
    for microbatch in range(2):
        total += float(stage.forward(0, microbatch, *tokens(step, microbatch, VOCAB)))
        stage.backward(0, microbatch, None)
        for unit, gradients in stage.take_gradients(units).items():
            for name, taken in gradients.items():
                flat = unpack_gradient(taken) if isinstance(taken, Fp8Gradient) else taken.flatten()
                sums[unit, name] = sums.get((unit, name), 0.0) + flat
    for unit in units:
        stage.put_gradients(unit, {name: total for (of, name), total in sums.items() if of == unit})
    norms = stage.squared_norms()
    stage.apply(1e-2, 0.5)
    return total, norms


@pytest.mark.parametrize("config", [CONFIG, PACKED], ids=["float32", "fp8"])
def test_two_ranks_give_and_take_gradients_of_groups(config: RunConfig) -> None:
    config = replace(
        config, model=replace(config.model, tied=False), pipeline=PipelineSection(stages=1, groups=2)
    )
    units = unit_names(config.model)
    alone = StageModel(config, CPU)
    alone.build(0, 1)
    expected = [grouped_step(alone, units, step) for step in range(3)]
    with leading(config, 2) as leader:
        leader.build(0, 1)
        found = [grouped_step(leader, units, step) for step in range(3)]
    # In e4m3 both ranks' gradients are rounded before they are added; AdamW's first steps make much of it.
    packed = config.training.gradients == "fp8"
    assert found[0][1] == pytest.approx(expected[0][1], rel=0.06 if packed else 1e-4)
    for (loss, _), (one_loss, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(one_loss, rel=0.02 if packed else 1e-5)


def test_a_stage_with_several_chunks_and_groups_is_refused() -> None:
    config = replace(CONFIG, pipeline=PipelineSection(stages=3, groups=2))
    with pytest.raises(RunError, match=r"2 devices cannot share"):
        check_sizes(config, 2)
    check_sizes(replace(config, model=replace(config.model, tied=False)), 2)
