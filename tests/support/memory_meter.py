"""What torch holds on a CPU over a stage's step, as its profiler counts it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile, record_function

from node.config.schema import RunConfig
from node.schedule.placement import slice_ranges
from node.schedule.schedule import Kind, one_f_one_b
from node.stage.stage_model import StageModel


@dataclass
class Meter:
    """Bytes that torch holds, and the most it has held, over some work."""

    now: int = 0
    most: int = 0

    def count(self, work: Callable[[], object]) -> None:
        with _profiled() as profiler:
            work()
        assert profiler.kineto_results is not None
        found = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(found, key=lambda event: event.start_ns()):
            self.now += event.nbytes()
            self.most = max(self.most, self.now)


def by_step(steps: int, work: Callable[[], object]) -> list[Meter]:
    """For each time that `work` is done: what torch holds after it, and the most meanwhile, as if the first
    one had begun with nothing."""
    names = [f"step {number}" for number in range(steps)]
    with _profiled() as profiler:
        for name in names:
            with record_function(name):
                work()
    assert profiler.kineto_results is not None
    events = list(profiler.kineto_results.events())
    ends = sorted(one.start_ns() + one.duration_ns() for one in events if one.name() in names)
    memory = sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns())
    found, now, left = [], 0, iter(memory)
    event = next(left, None)
    for end in ends:
        meter = Meter(now=now, most=now)
        while event is not None and event.start_ns() <= end:
            meter.now += event.nbytes()
            meter.most = max(meter.most, meter.now)
            event = next(left, None)
        now = meter.now
        found.append(meter)
    return found


@contextmanager
def _profiled() -> Iterator[profile]:
    # What an earlier test left in cycles would be counted as freed when Python comes to it.
    gc.collect()
    # What is left is a module's, or an object's that is still in use: later collections need not look at it.
    gc.freeze()
    # oneDNN's products have buffers whose sizes depend on the processor.
    was_on = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        # torch.profiler would import torch's compiler, for seconds.
        with profile(profile_memory=True) as profiler:
            yield profiler
    finally:
        torch.backends.mkldnn.enabled = was_on


def measured(config: RunConfig, model: StageModel, stage: int, held: int) -> int:
    """The most that a step takes that holds so many microbatches, or slices, at once, from the model's making
    on.

    In the order of 1F1B, with one microbatch more: only from the second backward on there are gradients to
    add to.
    """
    training, sizes = config.training, config.model
    shape = (training.microbatch, sizes.sequence)
    labels = torch.zeros(shape, dtype=torch.int64) if stage else None

    slices = slice_ranges(config)
    # The first of so many stages holds that many.
    stages = held - len(slices) + 1
    order, *_ = one_f_one_b(stages, 1 - (-held // len(slices)), slices=len(slices))

    def step() -> None:
        model.begin_step()
        for action in order:
            own = slices[action.slice]
            shape = training.microbatch, len(own)
            if action.kind is Kind.FORWARD:
                fed = torch.randn(*shape, sizes.hidden) if stage else torch.zeros(shape, dtype=torch.int64)
                wanted = None if labels is None else labels[:, own.start : own.stop]
                model.forward(0, action.microbatch, fed, wanted, number=action.slice)
                del fed
            else:
                above = None if stage else torch.randn(*shape, sizes.hidden)
                model.backward(0, action.microbatch, above, action.slice)
                del above
        model.finish_step()
        model.squared_norms()
        model.apply(1e-3, 1.0)

    meter = Meter()
    meter.count(lambda: model.build(stage, 2))
    # Initial weights are drawn before gradients and activations are there.
    meter.most = meter.now
    meter.count(step)
    return meter.most
