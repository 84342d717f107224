"""Captured passes give autograd's bits, whatever is in flight; graphs themselves run on GPUs (tests/gpu).

Here work is recorded by a stand-in that does it again when it is replayed, and leaves gradients as they were
when it is recorded, as a capture does.
"""

import gc
import itertools
import logging
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention.reach import Documents
from kernels.fp8.reference import Fp8Gradient
from node.config.schema import ModelSection
from node.model import storage
from node.model.chunk import build_chunk, weight_dtype
from node.model.storage import configured
from node.model.units import unit_names
from node.stage.captured_passes import CapturedPasses, Work
from node.stage.passes import AutogradPasses, ChunkCall
from node.training.gradients import Gradients
from node.training.optimizer import StageOptimizer
from tests.support.passes import CASES

CPU = torch.device("cpu")
SHAPE = (2, 16)
SHARES = 3
HALVES = (("llama", True), ("gpt2", False), ("llama", False), ("gpt2", True))
"""Family of the model, and whether it is the last half."""
ORDER = ("f0", "f1", "b0", "f2", "b1", "b2")
"""Never more than two microbatches between their passes."""


class Again:
    """Records work on a CPU."""

    def __init__(self, optimizer: StageOptimizer, fail_at: int = -1) -> None:
        self._optimizer = optimizer
        self._fail_at = fail_at
        self.works: list[Work] = []

    @property
    def recorded(self) -> int:
        return len(self.works)

    def record(self, work: Work, *, apart: bool) -> Work:
        if self.recorded == self._fail_at:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        number = self.recorded
        self.works.append(work)
        before = [(tensor, tensor.clone()) for tensor in main_gradients(self._optimizer)]
        work()
        for tensor, value in before:
            tensor.copy_(value)
        return lambda: self.works[number]()


def main_gradients(optimizer: StageOptimizer) -> list[Tensor]:
    gradients: Gradients = optimizer.gradients
    found: list[Tensor] = []
    packed = getattr(gradients, "packed", {})
    for parameter in optimizer.parameters:
        kept = packed.get(parameter)
        if isinstance(kept, Fp8Gradient):
            found += [kept.codes, kept.exponents]
        else:
            found.append(gradients.get(parameter))
    return found


class Half:
    """The first or the second half of a small model, with its optimizer."""

    def __init__(
        self,
        case: str,
        family: str,
        *,
        last: bool,
        captured: bool,
        fail_at: int = -1,
        again: bool = False,
    ) -> None:
        training, storage, lora = CASES[case]
        model = ModelSection(family=family, layers=2, hidden=64, heads=2, kv_heads=2, ffn=96, sequence=16)
        units = unit_names(model)
        self.last = last
        chunk = build_chunk(
            model,
            units[2:] if last else units[:2],
            7,
            CPU,
            weight_dtype(training.weights),
            replace(configured(storage), again=again),
            lora=lora,
        )
        self.optimizer = StageOptimizer([chunk], training, 7, gradients_in_place=captured)
        self.recorder = Again(self.optimizer, fail_at)
        self.passes: AutogradPasses | CapturedPasses
        if captured:
            self.passes = CapturedPasses(
                chunk, self.optimizer.gradients, training.precision, CPU, SHARES, self.recorder
            )
        else:
            self.passes = AutogradPasses(ChunkCall(chunk), training.precision, CPU, SHARES)

    def begin(self) -> None:
        self.passes.begin_step()
        self.optimizer.zero_grad()

    def act(self, step: int, action: str) -> Tensor | None:
        microbatch = int(action[1])
        generator = torch.Generator().manual_seed(step * 10 + microbatch)
        tokens = torch.randint(0, 256, SHAPE, generator=generator)
        hidden = torch.randn(*SHAPE, 64, generator=generator)
        if action[0] == "f":
            self.optimizer.begin_forward(microbatch)
            if self.last:
                return self.passes.forward(microbatch, hidden, tokens)
            return self.passes.forward(microbatch, tokens, None)
        self.optimizer.begin_backward(microbatch)
        return self.passes.backward(microbatch, None if self.last else hidden)

    def step(self, step: int) -> list[Tensor]:
        """Everything that a step gives to others, and the weights after it."""
        self.begin()
        made = [self.act(step, action) for action in ORDER]
        norms = self.optimizer.squared_norms()
        self.optimizer.apply(1e-2, 0.5)
        given = [tensor for tensor in made if tensor is not None]
        weights = [parameter.detach().clone() for parameter in self.optimizer.parameters]
        return [*given, torch.tensor(list(norms.values())), *weights]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("case", "family", "last"),
    [
        # Each case, and each half of each family, in turn.
        *((case, *half) for case, half in zip(CASES, itertools.cycle(HALVES), strict=False)),
        *(("agoq, fp8, bf16", *half) for half in HALVES[:2]),
    ],
)
def test_replays_give_autograds_bits(case: str, family: str, last: bool) -> None:
    plain = Half(case, family, last=last, captured=False)
    captured = Half(case, family, last=last, captured=True)
    for step in range(3):
        assert_same(captured.step(step), plain.step(step))
    # Two slots of two passes each, made in the second step.
    assert captured.recorder.recorded == 4


@pytest.mark.parametrize(
    ("case", "again"),
    [
        *((case, False) for case in ("autocast", "products in fp8")),
        *((case, True) for case in ("recompute", "products in fp8, agoq, bf16", "lora")),
    ],
)
def test_replays_of_blocks_that_run_again_or_of_a_head_in_pieces_give_autograds_bits(
    case: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not again:
        monkeypatch.setattr(storage, "HEAD_LOGITS", 10 * 256)  # of 32 tokens
    plain = Half(case, "llama", last=True, captured=False)
    graphs = Half(case, "llama", last=True, captured=True, again=again)
    for step in range(3):
        assert_same(graphs.step(step), plain.step(step))


@pytest.mark.parametrize("case", ["autocast", "products in fp8"])
def test_passes_after_a_local_step_are_of_its_weights(case: str) -> None:
    halves = [Half(case, "llama", last=True, captured=on) for on in (False, True)]
    made: list[list[Tensor]] = [[], []]
    for step, half in itertools.product(range(3), halves):
        half.step(step)
    for found, half in zip(made, halves, strict=True):
        half.begin()
        for number in range(3):
            given = [half.act(3, f"{action}0") for action in "fb"]
            found += [one for one in given if one is not None]
            half.optimizer.local_step(1e-2, number, 1.0)
            half.passes.weights_changed()
    assert_same(*made)
    assert not torch.equal(made[0][0], made[0][2]), "the loss of the same microbatch before and after"


def test_the_first_step_records_nothing() -> None:
    half = Half("autocast", "llama", last=False, captured=True)
    half.step(0)
    assert half.recorder.recorded == 0
    # Nor does one after a step that came to no backward.
    early = Half("autocast", "llama", last=False, captured=True)
    early.begin()
    early.act(0, "f0")
    early.begin()
    early.act(0, "f0")
    assert early.recorder.recorded == 0


def test_an_unfinished_step_leaves_nothing_behind() -> None:
    plain = Half("fp8", "llama", last=True, captured=False)
    captured = Half("fp8", "llama", last=True, captured=True)
    for step in range(2):
        assert_same(captured.step(step), plain.step(step))
    captured.begin()
    for action in ("f0", "f1", "b0"):
        captured.act(9, action)
    assert_same(captured.step(2), plain.step(2))
    assert captured.recorder.recorded == 4


@pytest.mark.parametrize(
    ("case", "captured"),
    [
        ("autocast", False),
        *((case, True) for case in ("float32", "fp8", "agoq", "products in fp8, agoq, bf16")),
        *((case, True) for case in ("recompute", "lora, 4 bits, dropout")),
    ],
)
def test_a_dropped_stage_is_freed(case: str, captured: bool) -> None:
    """At once, not when cycles are collected: that may come while its successor's graphs are captured, which
    freeing a graph breaks. And hooks of tensors that lead back to them would keep it for good."""
    half = Half(case, "llama", last=True, captured=captured)
    half.step(0)
    half.step(1)
    weights = [weakref.ref(parameter) for parameter in half.optimizer.parameters]
    leaves = [weakref.ref(leaf) for leaf in getattr(half.passes, "_leaves", {}).values()]
    assert weights and bool(leaves) == captured
    # A graph holds kernels, not what asked for them.
    half.recorder.works.clear()
    gc.collect()
    gc.disable()
    try:
        del half
        held = [ref for ref in (*weights, *leaves) if ref() is not None]
    finally:
        gc.enable()
    assert not held


def test_results_outlive_their_slot() -> None:
    """A step's tensors may still be in transit when their microbatch's buffers are written again."""
    half = Half("autocast", "llama", last=False, captured=True)
    half.step(0)
    half.begin()
    first = half.act(1, "f0")
    assert first is not None
    kept = first.clone()
    half.act(1, "b0")
    half.act(1, "f1")
    assert torch.equal(first, kept)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_passes_that_cannot_be_captured_run_through_autograd(
    fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Half("fp8", "llama", last=True, captured=False)
    captured = Half("fp8", "llama", last=True, captured=True, fail_at=fail_at)
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            assert_same(captured.step(step), plain.step(step))
    (record,) = caplog.records
    assert record.getMessage().endswith("operation not permitted when stream is capturing")
    assert captured.recorder.recorded == fail_at


def test_a_microbatch_of_more_documents_than_graphs_have_runs_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch would warn that graphs keep the parameters on a stream of their own, which the product knows."""
    told: list[bool] = []
    monkeypatch.setattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", told.append)
    first = torch.zeros(SHAPE, dtype=torch.bool)
    few, many = (Documents.of(starts, CPU) for starts in (first, torch.ones_like(first)))
    assert not many.like(few)
    made: list[list[Tensor]] = []
    for captured in (False, True):
        half = Half("autocast", "llama", last=True, captured=captured)
        generator = torch.Generator().manual_seed(1)
        found: list[Tensor] = []
        for step in range(3):
            half.begin()
            for microbatch, documents in enumerate((few, many if step == 2 else few)):
                tokens = torch.randint(0, 256, SHAPE, generator=generator)
                hidden = torch.randn(*SHAPE, 64, generator=generator)
                found.append(half.passes.forward(microbatch, hidden, tokens, documents))
                gradient = half.passes.backward(microbatch, None)
                assert gradient is not None
                found.append(gradient)
                assert told == ([False] if captured and step == 2 and microbatch else [])
            half.optimizer.squared_norms()
            half.optimizer.apply(1e-2, 0.5)
        made.append([*found, *(parameter.detach().clone() for parameter in half.optimizer.parameters)])
    assert half.recorder.recorded == 2
    assert_same(made[1], made[0])
