"""A plan of memory follows what steps take, and a device that runs short: other plans, the same bits."""

import errno
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from node.config.schema import RunConfig, StorageSection
from node.model import offload
from node.stage import out_of_memory, stage_model
from node.stage.allocator import Held
from node.stage.collectives import collective
from node.stage.memory_control import MOST_STEPS, MemoryControl
from node.stage.out_of_memory import (
    NOTE_FILE,
    VALID_SECONDS,
    MemoryNote,
    device_memory_text,
    exhausted,
    ran_out,
)
from node.stage.session import short_reason
from node.stage.stage_model import StageModel
from node.tuning.device_memory import WORKSPACES, Devices
from node.tuning.memory import FIXED_BYTES, stage_memory
from node.tuning.memory_plan import Choice, MemoryPlan, Room, least_stage_bytes
from node.tuning.state_moves import STAYS, Moved
from tests.support.memory_meter import by_step
from tests.support.passes import Forced
from tests.support.stored_runs import CPU, FORMS, run
from wire.errors import DeviceLostError
from wire.identity.enrolment import Hardware

CARDS = Devices(on_cpu=False, host_bytes=1 << 40)
CONFIG = replace(
    run("autocast"),
    model=replace(run("autocast").model, layers=12, hidden=64, ffn=96, vocab=101, sequence=16),
    storage=StorageSection(attention="8"),
)
CONFIG = replace(CONFIG, training=replace(CONFIG.training, cuda_graphs=False))
MOST, LEAST = stage_memory(CONFIG, 2, CARDS)[0].total, least_stage_bytes(CONFIG, 2, CARDS)[0]
MIDDLE = LEAST + (MOST - LEAST) * 2 // 5


def control(memory_bytes: int, devices: Devices = CARDS) -> MemoryControl:
    return MemoryControl(CONFIG, 2, 0, Room(devices=devices, memory_bytes=memory_bytes))


def as_planned(plan: MemoryPlan) -> int:
    """The bytes in tensors at the peak."""
    return replace(plan.memory, pages=0).total - FIXED_BYTES


def after_two(one: MemoryControl, taken: int) -> MemoryPlan | None:
    """The first step with a plan does not count."""
    assert one.step_done(100 * taken) is None
    return one.step_done(taken)


def test_what_a_plan_foresaw_changes_nothing_and_is_looked_at_less_and_less_often() -> None:
    one = control(MIDDLE)
    assert one.plan.fits and one.plan.text()
    for _ in range(40):
        assert one.step_done(as_planned(one.plan)) is None
    # Looked at after 2, 4, 8, 16 and 32 steps, and next after 64: until then nothing is noticed.
    much = 2 * as_planned(one.plan)
    changes = [step for step in range(41, 65) if one.step_done(much) is not None]
    assert changes == [64]
    assert MOST_STEPS >= 64


def test_up_to_five_percent_is_what_a_plan_may_be_off() -> None:
    taken = as_planned(control(MIDDLE).plan)
    more = int(0.049 * (taken - WORKSPACES))
    assert after_two(control(MIDDLE), taken + more) is None


def test_a_step_that_took_more_memory_is_planned_with_less() -> None:
    one = control(MIDDLE)
    before = one.plan
    taken = as_planned(before)
    more = (MIDDLE - LEAST) // 2
    assert more > 0.05 * (taken - WORKSPACES)
    plan = after_two(one, taken + more)
    assert plan is not None and plan is one.plan and plan.fits
    assert plan.memory.total + more <= MIDDLE < before.memory.total + more
    assert plan.added >= before.added
    # As much more as before is what it was planned for.
    assert after_two(one, as_planned(plan) + more) is None


def test_a_step_that_took_less_memory_gets_a_faster_plan() -> None:
    one = control(LEAST + (MOST - LEAST) // 10)
    before, taken = one.plan, as_planned(one.plan)
    plan = after_two(one, taken - (MOST - LEAST))
    assert plan is not None and plan.added < before.added - 0.01


def test_where_all_is_kept_or_memory_is_not_known_there_is_nothing_to_plan() -> None:
    for one in (control(MOST), control(0)):
        assert after_two(one, as_planned(one.plan)) is None
    assert after_two(control(0), 1 << 50) is None
    assert after_two(control(MIDDLE), 0) is None, "the device does not say"


def test_a_device_that_runs_short_gets_plans_for_less_until_none_takes_less() -> None:
    one = control(MOST)
    totals, words = [one.plan.memory.total], []
    while (plan := one.ran_short()) is not None:
        totals.append(plan.memory.total)
        words.append(plan.text())
        assert len(totals) < 100
    assert totals == sorted(set(totals), reverse=True) and totals[-1] == LEAST
    assert all(words)
    # It is not planned for that much again, whatever steps take.
    assert after_two(one, 1) is None


# ---- on a stage's model


def steps(model: StageModel, count: int = 3) -> Iterator[list[Tensor]]:
    """Results of each step's passes, and the state after it; between steps the model may adapt."""
    training, sizes = CONFIG.training, CONFIG.model
    random = torch.Generator().manual_seed(5)
    for _ in range(count):
        tokens = torch.randint(0, sizes.vocab, (3, training.microbatch, sizes.sequence), generator=random)
        above = torch.randn(3, training.microbatch, sizes.sequence, sizes.hidden, generator=random)
        model.begin_step()
        found = [model.forward(0, number, tokens[number]) for number in range(2)]
        model.backward(0, 0, above[0])
        found.append(model.forward(0, 2, tokens[2]))
        model.backward(0, 1, above[1])
        model.backward(0, 2, above[2])
        model.finish_step()
        model.squared_norms()
        model.apply(1e-2, 0.5)
        state = [tensor for unit in model.optimizer.units for tensor in model.unit_state(unit).values()]
        yield [*found, *state]
        model.adapt()


def built(room: Room, config: RunConfig = CONFIG) -> StageModel:
    model = StageModel(config, CPU, room=room)
    model.build(0, 2)
    return model


@pytest.fixture(scope="module")
def expected() -> list[list[Tensor]]:
    return list(steps(built(Room()), 6))


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(all(map(torch.equal, mine, other)) for mine, other in pairs)


def test_a_stage_that_plans_anew_between_steps_has_the_same_bits(
    expected: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = built(Room(devices=CARDS, memory_bytes=MIDDLE))
    assert model._control is not None
    peaks = iter([1, 2, 1, 0.1, 1, 1])
    before = model._control.plan

    def measured(device: torch.device) -> int:
        assert model._control is not None
        return int(next(peaks) * as_planned(model._control.plan))

    monkeypatch.setattr(stage_model, "most_allocated", measured)
    assert same(list(steps(model, 6)), expected)
    # The last step takes what its plan says, which was made for more memory than there is.
    assert caplog.text.count("planned again") == 3
    assert model._control.plan == before


def failing(model: StageModel, monkeypatch: pytest.MonkeyPatch, *, kind: str, call: int, times: int) -> None:
    """Passes of this kind run out of memory at the `call`-th call, so many times."""
    (passes,) = model._passes
    work, calls = getattr(passes, kind), list[int]()

    def runs_out(*arguments: object) -> object:
        calls.append(1)
        if call <= len(calls) < call + times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return work(*arguments)

    monkeypatch.setattr(passes, kind, runs_out)


def test_a_forward_that_runs_short_of_memory_keeps_less_and_runs_again(
    expected: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one microbatch in flight, which keeps what it has."""
    model = built(Room(devices=CARDS, memory_bytes=MOST))
    assert model._control is not None and model._control.plan.text() == ""
    failing(model, monkeypatch, kind="forward", call=2, times=2)
    assert same(list(steps(model)), expected[:3])
    assert model._control.plan.text() != ""
    assert caplog.text.count("ran out of memory: ") == 2


def test_a_step_that_runs_short_in_backward_runs_again_with_another_plan(
    expected: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(Room(devices=CARDS, memory_bytes=MIDDLE))
    assert model._control is not None
    before = model._control.plan
    failing(model, monkeypatch, kind="backward", call=2, times=1)
    with pytest.raises(torch.OutOfMemoryError):
        next(steps(model))
    assert model.relieve()
    assert model._control.plan.memory.total < before.memory.total
    assert same(list(steps(model)), expected[:3])


def test_a_stage_without_a_plan_that_takes_less_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (
        Room(devices=CARDS, memory_bytes=LEAST),
        Room(devices=Devices(), memory_bytes=MIDDLE),
        Room(),
    ):
        model = built(room)
        with monkeypatch.context() as patched:
            failing(model, patched, kind="forward", call=1, times=99)
            with pytest.raises(torch.OutOfMemoryError):
                next(steps(model))
        assert not model.relieve()


# ---- running out of memory during a run: recognized errors, the message, and the note for the next start


TOO_MUCH = 1 << 50
GPU = torch.device("cuda:1")
HARDWARE = Hardware("a GPU", 8, 80_000, devices=2)


def test_out_of_memory_errors_are_recognised() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(TOO_MUCH)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(TOO_MUCH)
    for error in (
        of_torch.value,
        of_numpy.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ):
        assert ran_out(error), error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        DeviceLostError("the process of another device is gone"),
        ValueError("out of memory"),
    ],
)
def test_other_trouble_is_not_taken_for_it(error: Exception) -> None:
    assert not ran_out(error)


def test_it_is_not_mistaken_for_another_ranks_end() -> None:
    with pytest.raises(torch.OutOfMemoryError), collective():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(DeviceLostError), collective():
        raise RuntimeError("Connection closed by peer")


def test_the_line_names_the_stage_the_estimate_the_device_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5_000 * device.index, 80_000))
    there = Held(
        allocated=50_000, reserved=60_000, largest_free=7_000, most_allocated=50_000, most_reserved=60_000
    )
    monkeypatch.setattr(out_of_memory, "held", lambda device: there)
    error = exhausted(GPU, device_memory_text(GPU), offered=70_000, stage=2, stages=4, need=65_000)
    for place in ("stage 2 of 4", "need 65 kB", "offered 70 kB", "has 80 kB", "60 kB are this process's"):
        assert place in str(error) and place in error.happened
    for remedy in ("training.microbatch", "pipeline.window", "storage.preset", "pipeline.stages"):
        assert remedy in str(error) and remedy not in error.happened
    assert "\n" not in str(error)
    assert "and this node ends" not in error.happened and error.happened.endswith("5 kB free")
    assert short_reason(error) == error.happened, "it is not cut"
    assert (error.need, error.exit_code) == (65_000, 1)
    early = exhausted(GPU, "", offered=1)
    assert early.need == 0 and str(early).startswith("cuda:1 ran out of memory before it had a stage, ")


def test_a_silent_device_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert device_memory_text(GPU) == "cuda:1 does not report how much memory it has"
    assert device_memory_text(CPU).startswith("the machine has ")


def test_memory_that_ran_out_is_not_offered_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    note = MemoryNote(tmp_path, most_bytes=0)
    assert note.limit(HARDWARE) == HARDWARE
    note.write(HARDWARE, 65_000)
    limited = note.limit(HARDWARE)
    assert limited == replace(HARDWARE, memory_bytes=64_999)
    assert "65 kB" in caplog.text and str(tmp_path / NOTE_FILE) in caplog.text
    # What others leave of a GPU is another amount each time, and may be less already.
    assert note.limit(replace(HARDWARE, memory_bytes=90_000)).memory_bytes == 64_999
    assert note.limit(replace(HARDWARE, memory_bytes=30_000)).memory_bytes == 30_000
    # The owner decided otherwise meanwhile.
    assert MemoryNote(tmp_path, most_bytes=70_000).limit(HARDWARE) == HARDWARE
    for other in (replace(HARDWARE, devices=4), replace(HARDWARE, tensor_parallel=2)):
        assert note.limit(other) == other
    note.write(limited, 60_000)
    assert note.limit(HARDWARE).memory_bytes == 59_999, "the next smaller stage did not fit either"


def test_a_memory_note_is_valid_for_a_day_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    note, path = MemoryNote(tmp_path, most_bytes=0), tmp_path / NOTE_FILE
    note.write(HARDWARE, 65_000)
    written = json.loads(path.read_bytes())
    for change in ({"written": time.time() - VALID_SECONDS}, {"need": "much"}, {"need": None}):
        path.write_text(json.dumps({**written, **change}))
        assert note.limit(HARDWARE) == HARDWARE
    for damaged in (b"", b"{}", b"[1]"):
        path.write_bytes(damaged)
        assert note.limit(HARDWARE) == HARDWARE
    path.write_text(json.dumps(written))
    assert note.limit(HARDWARE).memory_bytes == 64_999


# ---- steps after the second take no memory that the second had not: what torch allocates on a CPU, counted


MOVED = Choice(moved=(offload.ALL,))
CHOICES = {
    "kept": (Choice.KEPT, Choice.KEPT),
    "again": (Choice.AGAIN, Choice.AGAIN),
    "moved": (MOVED, MOVED),
}
STATES = {"kept": STAYS, "again": STAYS, "moved": Moved(moments=1)}


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("plain", "kept"),
        ("autocast", "again"),
        ("agoq", "moved"),
        ("agoq, fp8, bf16", "kept"),
    ],
)
def test_no_step_after_the_second_takes_more(form: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    assert form in FORMS
    config = run(form)
    small = replace(config.model, hidden=64, ffn=96, vocab=101, sequence=16)
    config = replace(config, model=small)
    model = StageModel(config, CPU, room=Forced(CHOICES[way], STATES[way]))
    model.build(0, 2)
    shape = (config.training.microbatch, config.model.sequence)
    above = torch.randn(*shape, config.model.hidden)

    def step() -> None:
        model.begin_step()
        for action in ("f0", "f1", "b0", "b1"):
            if action[0] == "f":
                model.forward(0, int(action[1]), torch.zeros(shape, dtype=torch.int64))
            else:
                model.backward(0, int(action[1]), above)
        model.finish_step()
        model.squared_norms()
        model.apply(1e-3, 1.0)

    step(), step()
    third, *others = by_step(3, step)
    for other in others:
        assert other.now == third.now
        assert other.most - other.now == others[0].most - others[0].now > 0
