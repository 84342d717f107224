"""A plan of memory follows what steps take, and a device that runs short: other plans, the same bits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.config.schema import RunConfig, StorageSection
from node.stage import stage_model
from node.stage.memory_control import MOST_STEPS, MemoryControl
from node.stage.stage_model import StageModel
from node.tuning.device_memory import WORKSPACES, Devices
from node.tuning.memory import FIXED_BYTES, stage_memory
from node.tuning.memory_plan import MemoryPlan, Room, least_stage_bytes
from tests.support.stored_runs import CPU, run

GPU = Devices(on_cpu=False, host_bytes=1 << 40)
CONFIG = replace(
    run("autocast"),
    model=replace(run("autocast").model, layers=12, hidden=64, ffn=96, vocab=101, sequence=16),
    storage=StorageSection(attention="8"),
)
CONFIG = replace(CONFIG, training=replace(CONFIG.training, cuda_graphs=False))
MOST, LEAST = stage_memory(CONFIG, 2, GPU)[0].total, least_stage_bytes(CONFIG, 2, GPU)[0]
MIDDLE = LEAST + (MOST - LEAST) * 2 // 5


def control(memory_bytes: int, devices: Devices = GPU) -> MemoryControl:
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
    model = built(Room(devices=GPU, memory_bytes=MIDDLE))
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
    model = built(Room(devices=GPU, memory_bytes=MOST))
    assert model._control is not None and model._control.plan.text() == ""
    failing(model, monkeypatch, kind="forward", call=2, times=2)
    assert same(list(steps(model)), expected[:3])
    assert model._control.plan.text() != ""
    assert caplog.text.count("ran out of memory: ") == 2


def test_a_step_that_runs_short_in_backward_runs_again_with_another_plan(
    expected: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(Room(devices=GPU, memory_bytes=MIDDLE))
    assert model._control is not None
    before = model._control.plan
    failing(model, monkeypatch, kind="backward", call=2, times=1)
    with pytest.raises(torch.OutOfMemoryError):
        next(steps(model))
    assert model.relieve()
    assert model._control.plan.memory.total < before.memory.total
    assert same(list(steps(model)), expected[:3])


def test_a_stage_without_a_plan_that_takes_less_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (Room(devices=GPU, memory_bytes=LEAST), Room(devices=Devices(), memory_bytes=MIDDLE), Room()):
        model = built(room)
        with monkeypatch.context() as patched:
            failing(model, patched, kind="forward", call=1, times=99)
            with pytest.raises(torch.OutOfMemoryError):
                next(steps(model))
        assert not model.relieve()
