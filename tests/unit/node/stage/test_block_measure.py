"""What a node measures of its own device when it joins."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.config.schema import StorageSection
from node.model.host_memory import Copy, HostMemory
from node.model.storage import KINDS, PACKED, Storage, configured
from node.stage.block_measure import block_seconds, copy_rate, measured_times
from node.tuning.block_times import BlockTimes, PackTime, stored_forms
from tests.support.stored_runs import CPU, run

RATE = 2e9
"""Bytes a second each way."""


class Timeline(HostMemory):
    """A device whose seconds are made up: two engines run beside compute. The host waits only when asked
    to."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.now = 0.0
        self.copied = {"out": 0.0, "in": 0.0}
        """When each is done."""

    def _copy(self, way: str, copies: Iterable[Copy]) -> None:
        size = sum(source.nbytes for source, _ in copies)
        self.copied[way] = max(self.now, self.copied[way]) + size / RATE

    def copy_out(self, copies: Iterable[Copy]) -> None:
        self._copy("out", copies)

    def copy_in(self, copies: Iterable[Copy]) -> None:
        self._copy("in", copies)

    def wait(self, mark: Any) -> None:
        raise AssertionError("nothing waits for a copy here")

    def settle(self) -> None:
        raise AssertionError("nothing waits for a copy here")

    def finish(self) -> None:
        self.now = max(self.now, *self.copied.values())

    def clock(self) -> float:
        return self.now

    def _allocate(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)


def test_both_directions_are_copied_at_once_while_the_device_works() -> None:
    memory, began = Timeline(), list[bool]()

    def work() -> None:
        began.append(min(memory.copied.values()) > memory.now)

    assert copy_rate(memory, work, size=1 << 20) == pytest.approx(RATE)
    assert began and all(began)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("form", ["plain", "autocast"])
def test_each_form_that_a_run_may_have_is_packed_and_unpacked_by_the_clock(form: str, family: str) -> None:
    allow = ("8", "6", "5", "4", "attention:8", "attention:4", "attention_output:4", "attention_output:bf16")
    config = replace(run(form, family), storage=StorageSection(allow=allow))
    config = replace(config, model=replace(config.model, layers=2, sequence=64))
    times = measured_times(config, CPU)
    assert times is not None and times.measured
    assert min(times.forward, times.backward, times.attention, times.attention_output, times.ffn_input) > 0
    assert [(one.kind, one.form) for one in times.packing] == stored_forms(config)
    assert ("attention_output", "bf16") in stored_forms(config) or form == "autocast"
    assert {kind for kind, _ in stored_forms(config)} == set(KINDS)
    # Where nothing else is done, packing takes time; elsewhere a loaded machine may say 0.
    known = {(one.kind, one.form): (one.pack, one.unpack) for one in times.packing}
    assert all(min(known[kind, "4"]) > 0 for kind in ("attention", "attention_output"))
    assert all(min(pair) >= 0 for pair in known.values())


def test_a_run_that_stores_nothing_in_few_bits_has_nothing_to_measure() -> None:
    assert stored_forms(run("plain")) == []
    by_stage = replace(run("plain"), storage=StorageSection(preset="agoq", bits_by_stage=True))
    forms = [form for kind, form in stored_forms(by_stage) if kind == "norm_input"]
    assert sorted(forms) == sorted(form for form in KINDS["norm_input"] if form in PACKED)


def test_a_stage_in_another_storage_takes_its_packing_in_place_of_the_measured_ones() -> None:
    config = replace(run("plain"), storage=StorageSection(preset="compact", allow=("norm_input:8",)))
    times = measured_times(config, CPU)
    assert times is not None and times.stored == configured(config.storage)
    assert times.of_storage(times.stored) == times and BlockTimes.from_json(times.to_json()) == times
    assert block_seconds(config, CPU) > 0
    # The clock's own would be another each time.
    packing = {
        ("norm_input", "4"): (0.25, 0.5),
        ("norm_input", "8"): (0.125, 0.75),
        ("attention", "8"): (1, 1),
    }
    times = replace(
        times,
        forward=4.0,
        backward=8.0,
        packing=tuple(
            PackTime(kind=kind, form=form, pack=pack, unpack=unpack)
            for (kind, form), (pack, unpack) in packing.items()
        ),
    )
    wide = times.of_storage(replace(times.stored, norm_input="8"))
    assert (wide.forward, wide.backward) == (3.875, 8.25)
    bare = times.of_storage(Storage())
    assert (bare.forward, bare.backward) == (2.75, 6.5)
    # Parts that were measured to take more than the whole.
    assert replace(times, forward=1.0).of_storage(Storage()).forward == 0.5
